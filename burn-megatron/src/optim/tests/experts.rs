//! A layer with routed experts: its experts are held by other ranks than the rest of it.

use super::saving::{Saved, collect};
use super::*;
use crate::checkpoint::{Kind, Slice};
use backend_dist::shard::Unit;
use std::convert::Infallible;
use std::ops::Range;

const EXPERTS: usize = 4;
const WIDTH: usize = 4;
const STEPS: usize = 2;

/// A router, whose gradient is partial over tensor parallel ranks, and two matrices of all experts that the rank holds.
#[derive(Module, Debug)]
struct Moe {
    router: Param<Tensor<2>>,
    up: Param<Tensor<2>>,
    down: Param<Tensor<2>>,
}

/// Sizes on both grids over the same ranks.
#[derive(Clone, Copy, Debug)]
struct Folded {
    tp: usize,
    dp: usize,
    etp: usize,
    ep: usize,
    zero: u8,
    group: Option<usize>,
}

const SINGLE: Folded = Folded { tp: 1, dp: 1, etp: 1, ep: 1, zero: 0, group: None };

impl Folded {
    fn mesh(self) -> Mesh {
        let Self { tp, dp, etp, ep, zero, group: zero_group } = self;
        let layout = ParallelLayout { tp, dp, ep, etp: Some(etp), zero, zero_group, ..ParallelLayout::default() };
        Mesh::new(layout).unwrap()
    }

    fn run<T: Send>(self, f: impl Fn(Rank) -> Result<T, BoxError> + Sync) -> Vec<T> {
        launch(&self.mesh(), &[Device::flex()], f).unwrap()
    }
}

/// Copies of dense weights, copies of experts or neither: one rank, dense only, experts only, both, in every ZeRO
/// stage; and groups of ZeRO, in which experts are shared by one rank or by several.
fn cases() -> impl Iterator<Item = Folded> {
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
    let folded = |(tp, dp, etp, ep), zero, group| Folded { tp, dp, etp, ep, zero, group };
    let whole = sizes.into_iter().flat_map(move |sizes| (0..4).map(move |zero| folded(sizes, zero, None)));
    let groups = [((1, 4, 1, 2), 2), ((2, 4, 1, 2), 2), ((1, 6, 1, 2), 2)];
    whole.chain(groups.into_iter().flat_map(move |(sizes, of)| (1..4).map(move |zero| folded(sizes, zero, Some(of)))))
}

fn specs(mesh: &Mesh, rank: usize) -> Vec<BucketSpec> {
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

struct Worker {
    rank: Rank,
    specs: Vec<BucketSpec>,
    net: Moe,
    optimizer: Optimizer,
}

impl Worker {
    fn new(rank: Rank, case: Folded, config: &OptimizerConfig, dtype: DType) -> Self {
        let specs = specs(&rank.mesh, rank.rank);
        let mut optimizer = Optimizer::aligned(
            if case.ep == 1 { 1 } else { 4 },
            config,
            specs.clone(),
            |grid| Sharding::of(&rank, grid),
            |grid, size| rank.subgroup(grid.tensor_parallel(), size),
            (&Device::flex(), dtype),
            usize::MAX,
        );
        let params = || specs.iter().flat_map(|bucket| &bucket.params);
        let net = params().map(|spec| param(spec, dtype)).collect::<Vec<_>>();
        let [router, up, down] = net.try_into().expect("three parameters");
        let net = Moe { router, up, down };
        optimizer.check(&net, &[0, 1], &[]).unwrap();
        let net = (0..2).fold(net, |net, bucket| optimizer.shard(bucket, net));
        Self { rank, specs, net, optimizer }
    }

    /// One step. Every sample's gradient of an expert comes to one of the ranks that hold it, wherever the sample is:
    /// the data-parallel ranks of either grid have disjoint shares of the samples.
    fn step(&mut self, index: usize, micro_batches: usize) -> f64 {
        for (bucket, spec) in self.specs.iter().enumerate() {
            let dp_ranks = self.rank.group(spec.grid().dp_ranks());
            let each = SAMPLES / dp_ranks.size();
            let mine: Vec<usize> = (dp_ranks.rank() * each..(dp_ranks.rank() + 1) * each).collect();
            for samples in mine.chunks(each.div_ceil(micro_batches)) {
                for (param, sample) in spec.params.iter().flat_map(|param| samples.iter().map(move |s| (param, *s))) {
                    let grad = local_gradient(param, |name, place| exact(index, sample, name, place));
                    self.optimizer.add(bucket, param.id, grad);
                }
                self.optimizer.complete(bucket);
            }
        }
        let holders = [GridKind::Dense, GridKind::Expert].map(|grid| (grid, self.rank.group(grid.model_parallel())));
        finish_step(&mut self.optimizer, &mut self.net, index, &holders)
    }

    fn weights(&mut self) -> Vec<f64> {
        let net = (0..2).fold(self.net.clone(), |net, bucket| self.optimizer.gather(bucket, net));
        let of = |param: &Param<Tensor<2>>| param.val().into_data().iter::<f64>().collect::<Vec<_>>();
        [&net.router, &net.up, &net.down].map(of).concat()
    }

    fn save(&self) -> Vec<Slice> {
        (0..2).flat_map(|bucket| self.optimizer.snapshot(bucket, &self.net, None)).collect()
    }
}

fn param(spec: &ParamSpec, dtype: DType) -> Param<Tensor<2>> {
    let initial = |section: &Section| section.initial(Init::Normal { std: 1.0 }, 7);
    let data = TensorData::new(spec.sections.iter().flat_map(initial).collect::<Vec<_>>(), spec.local_shape());
    let tensor = Tensor::from_data(data, (&Device::flex().autodiff(), dtype)).require_grad();
    Param::initialized(ParamId::from(spec.id), tensor)
}

/// Global tensors of each grid from the ranks that hold it once; all other ranks hold the same.
fn assembled(case: Folded, locals: &[Vec<f64>]) -> BTreeMap<String, HostTensor> {
    let mesh = case.mesh();
    let mut slices = Vec::new();
    for (rank, local) in locals.iter().enumerate() {
        let mut rest = local.as_slice();
        for bucket in specs(&mesh, rank) {
            let grid = bucket.grid();
            for param in &bucket.params {
                let start = local.len() - rest.len();
                let (own, tail) = rest.split_at(param.local_len());
                let first = mesh.group_of(grid.dp_ranks(), rank)[0];
                assert_eq!(own, &locals[first][start..start + own.len()], "copies are the same: {case:?}");
                rest = tail;
                if first == rank {
                    slices.extend(param.sections_of(own).map(|(section, values)| (section.clone(), values.to_vec())));
                }
            }
        }
    }
    Registry::assemble(slices.iter().map(|(section, local)| (section, local.as_slice()))).unwrap()
}

type Outcome = (BTreeMap<String, HostTensor>, Vec<f64>, BTreeMap<String, HostTensor>);

fn train(case: Folded, config: &OptimizerConfig, micro_batches: usize) -> Outcome {
    let ranks = case.run(|rank| {
        let mut worker = Worker::new(rank, case, config, DType::F64);
        let norms: Vec<f64> = (0..STEPS).map(|step| worker.step(step, micro_batches)).collect();
        let gradients = [0, 1].map(|bucket| worker.optimizer.gradients(bucket, 0.5)).concat();
        Ok((worker.weights(), norms, gradients))
    });
    let norms = ranks[0].1.clone();
    assert!(ranks.iter().all(|rank| rank.1 == norms), "all ranks know the same norm: {case:?}");
    let (weights, gradients): (Vec<_>, Vec<_>) = ranks.into_iter().map(|(weights, _, grads)| (weights, grads)).unzip();
    (assembled(case, &weights), norms, assembled(case, &gradients))
}

/// With gradients whose sums are exact, every layout of both grids ends with the bits of one rank: weights, norms, in
/// which every element counts once, and gradients.
fn equals_one_rank(config: OptimizerConfig) {
    let single = train(SINGLE, &config, 1);
    let squares = single.2.values().flat_map(|tensor| &tensor.data).map(|g| g * g).sum::<f64>();
    assert!((single.1[STEPS - 1] - squares.sqrt()).abs() < 1e-12 * squares.sqrt());
    for case in cases() {
        for micro_batches in [1, 2] {
            assert_eq!(train(case, &config, micro_batches), single, "{case:?} {config:?}");
        }
    }
}

#[test]
fn experts_with_adamw_equal_one_rank() {
    equals_one_rank(kinds()[0]);
    equals_one_rank(offload::offloaded(kinds()[0], 1.0));
}

#[test]
fn experts_with_muon_equal_one_rank() {
    equals_one_rank(kinds()[3]);
}

/// Every element is written by one rank of the world, and any layout resumes what any other saved.
#[test]
fn checkpoints_of_experts_fit_every_layout() {
    let folded = |tp, dp, etp, ep, zero| Folded { tp, dp, etp, ep, zero, group: None };
    let layouts = [
        SINGLE,
        folded(1, 2, 1, 2, 0),
        folded(1, 4, 1, 4, 1),
        folded(2, 2, 2, 2, 3),
        folded(2, 2, 1, 2, 2),
        folded(2, 1, 1, 1, 0),
        folded(1, 4, 2, 1, 3),
        Folded { group: Some(2), ..folded(2, 4, 1, 2, 2) },
        Folded { group: Some(2), ..folded(1, 4, 1, 2, 3) },
    ];
    for config in [kinds()[0], kinds()[3], offload::offloaded(kinds()[0], 1.0)] {
        for dtype in [DType::F64, DType::BF16] {
            let mut kept: Option<(Saved, BTreeMap<String, HostTensor>)> = None;
            for case in layouts {
                let before = kept.as_ref().map(|(saved, _)| saved);
                let parts = case.run(|rank| {
                    let mut worker = Worker::new(rank, case, &config, dtype);
                    match before {
                        Some(saved) => load(&mut worker, saved, dtype),
                        None => {
                            worker.step(0, 1);
                        }
                    }
                    let saved = worker.save();
                    worker.step(1, 1);
                    Ok((saved, worker.weights()))
                });
                let (slices, locals): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
                let now = (collect(slices.into_iter().flatten()), assembled(case, &locals));
                match &kept {
                    Some(before) => assert!(now == *before, "{case:?} {config:?} {dtype:?}"),
                    None => kept = Some(now),
                }
            }
        }
    }
}

fn load(worker: &mut Worker, saved: &Saved, dtype: DType) {
    let mut read = |kind: Kind, section: &Section, ranges: &[Range<usize>]| {
        let kind = if kind == Kind::Weight && dtype == DType::BF16 { Kind::Master } else { kind };
        Ok::<_, Infallible>(saved[&(kind, section.name.clone())].read_box(ranges).into())
    };
    for bucket in 0..2 {
        let (net, result) = worker.optimizer.restore(bucket, worker.net.clone(), true, &mut read);
        worker.net = net;
        result.unwrap();
    }
    worker.optimizer.set_updates(1);
}
