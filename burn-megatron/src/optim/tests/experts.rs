//! A layer with routed experts: its experts are held by other ranks than the rest of it.

use super::layouts::equals_one_rank;
use super::saving::collect;
use super::*;
use backend_dist::shard::Unit;

const EXPERTS: usize = 4;
const WIDTH: usize = 4;

/// A router, whose gradient is partial over tensor parallel ranks, and two matrices of all experts that the rank holds.
#[derive(Module, Debug)]
struct Moe {
    router: Param<Tensor<2>>,
    up: Param<Tensor<2>>,
    down: Param<Tensor<2>>,
}

/// Sizes on both grids over the same ranks.
fn folded((tp, dp, etp, ep): (usize, usize, usize, usize), zero: u8, group: Option<usize>) -> Case {
    Case { tp, dp, etp: Some(etp), ep, zero, group, ..Case::SINGLE }
}

/// Copies of dense weights, copies of experts or neither: one rank, dense only, experts only, both, in every ZeRO
/// stage; and groups of ZeRO, in which experts are shared by one rank or by several.
fn cases() -> impl Iterator<Item = Case> {
    let sizes = [
        (1, 2, 1, 2),
        (2, 1, 1, 2),
        (2, 1, 1, 1),
        (2, 1, 2, 1),
        (2, 2, 2, 2),
        (2, 2, 1, 2),
        (1, 4, 1, 4),
        (1, 4, 2, 2),
        (1, 6, 1, 2),
    ];
    let whole = sizes.into_iter().flat_map(|sizes| (0..4).map(move |zero| folded(sizes, zero, None)));
    let groups = [((1, 4, 1, 2), 2), ((2, 4, 1, 2), 2), ((1, 6, 1, 2), 2)];
    whole.chain(groups.into_iter().flat_map(|(sizes, of)| (1..4).map(move |zero| folded(sizes, zero, Some(of)))))
}

impl Buckets for Moe {
    fn specs(mesh: &Mesh, rank: usize, _: usize) -> Vec<BucketSpec> {
        let (at, size) = (mesh.coords(rank), |axis| mesh.axis_size(axis));
        let tp = GroupPosition { rank: at.tp, size: size(Axis::Tp) };
        let etp = GroupPosition { rank: at.etp, size: size(Axis::Etp) };
        let local = EXPERTS / size(Axis::Ep);
        let experts = || at.ep * local..(at.ep + 1) * local;
        let up = experts().flat_map(|expert| {
            ["gate", "up"].map(|name| Section::split(format!("{expert}.{name}"), &[WIDTH, 3], 0, etp.size, etp))
        });
        let down =
            experts().map(|expert| Section::split(format!("{expert}.down"), &[3, WIDTH], 1, etp.size, etp)).collect();
        let experts = [up.collect(), down]
            .map(|sections| ParamSpec { unit: Unit::Experts(0), ..ParamSpec::new(sections, false) })
            .to_vec();
        let router = ParamSpec::new(vec![Section::replicated("router", &[EXPERTS, 3], tp)], true);
        let dense = vec![ParamSpec { unit: Unit::Layer(0), ..router }];
        let bucket = |(key, params)| BucketSpec { key, params, hidden: true, at_once: 1, scale: ParamScale::default() };
        [(2, dense), (3, experts)].map(bucket).to_vec()
    }

    fn new(params: &[&ParamSpec], dtype: DType) -> Self {
        Moe { router: param(params[0], dtype), up: param(params[1], dtype), down: param(params[2], dtype) }
    }
}

#[test]
fn experts_with_adamw_equal_one_rank() {
    equals_one_rank::<Moe>(kinds()[0], cases());
    equals_one_rank::<Moe>(offload::offloaded(kinds()[0], 1.0), cases());
}

#[test]
fn experts_with_muon_equal_one_rank() {
    equals_one_rank::<Moe>(kinds()[3], cases());
}

/// Every element is written by one rank of the world, and any layout resumes what any other saved.
#[test]
fn checkpoints_of_experts_fit_every_layout() {
    let layouts = [
        Case::SINGLE,
        folded((1, 2, 1, 2), 0, None),
        folded((1, 4, 1, 4), 1, None),
        folded((2, 2, 2, 2), 3, None),
        folded((2, 2, 1, 2), 2, None),
        folded((2, 1, 1, 1), 0, None),
        folded((1, 4, 2, 1), 3, None),
        folded((2, 4, 1, 2), 2, Some(2)),
        folded((1, 4, 1, 2), 3, Some(2)),
    ];
    for config in [kinds()[0], kinds()[3], offload::offloaded(kinds()[0], 1.0)] {
        for dtype in [DType::F64, DType::BF16] {
            let mut kept: Option<(Saved, BTreeMap<String, HostTensor>)> = None;
            for case in layouts {
                let before = kept.as_ref().map(|(saved, _)| saved);
                let parts = case.run(|rank| {
                    let mut worker = Worker::<Moe>::new(rank, case, &config, dtype);
                    match before {
                        Some(saved) => worker.resume(saved, 1, dtype),
                        None => _ = worker.step(0, SAMPLES, exact),
                    }
                    let saved = worker.save();
                    worker.step(1, SAMPLES, exact);
                    Ok((saved, worker.weights()))
                });
                let (slices, locals): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
                let now = (collect(slices.into_iter().flatten()), assemble::<Moe>(case, &locals));
                match &kept {
                    Some(before) => assert!(now == *before, "{case:?} {config:?} {dtype:?}"),
                    None => kept = Some(now),
                }
            }
        }
    }
}
