//! The layer in a layout.

use std::collections::BTreeMap;

use backend_dist::launch::{Rank, launch};
use backend_dist::mesh::{Axis, Mesh};
use backend_dist::ops::context::{ContextParallel, CpCommType};
use backend_dist::ops::pull_back;
use backend_dist::shard::Unit;
use burn::module::Module;
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use models::layers::{FeedForward, Ffn, Norm, NormKind};
use models::{MicroBatch, ParamBuilder, Recompute, recompute};

use super::{Case, EPS, Found, HIDDEN, SAMPLES, Weights, element};
use crate::harness::{Collect, Local, assemble, host};

/// The layer's output and gradients, and the number of micro-batches of the samples: one for each data parallel rank.
pub fn run(case: &Case, layout: &str) -> (Found, usize) {
    run_with(case, layout, &Recompute::default(), None)
}

/// The same with the experts' activations recomputed in the backward pass.
pub fn run_again(case: &Case, layout: &str) -> (Found, usize) {
    run_with(case, layout, &Recompute::selective(&[recompute::Module::MlpActivation]), None)
}

/// The same with all-to-alls overlapped with this many chunks of the experts, and activations that are saved or
/// recomputed.
pub fn run_beside(case: &Case, layout: &str, pieces: usize, again: bool) -> (Found, usize) {
    let modules = if again { &[recompute::Module::MlpActivation][..] } else { &[] };
    run_with(case, layout, &Recompute::selective(modules), Some(pieces))
}

/// Values of some samples and positions.
type Part = (Vec<usize>, Vec<usize>, Vec<f64>);

fn run_with(case: &Case, layout: &str, recompute: &Recompute, chunks: Option<usize>) -> (Found, usize) {
    let mesh = Mesh::new(layout.parse().unwrap()).unwrap();
    let ranks = launch(&mesh, &[Device::flex()], |rank: Rank| {
        let (samples, positions) = (samples(&rank), positions(&rank, case.seq));
        let params = ParamBuilder::new(&rank, FloatDType::F64, 0).with_source(&Weights).with_recompute(recompute);
        let mut params = params.with_moe_comm_overlap(chunks.is_some(), chunks);
        params.begin(Unit::Layer(0));
        let norm = Norm::new(&mut params, "norm", HIDDEN, NormKind::Rms, EPS)?;
        let layer = FeedForward::new(&mut params, "layers.0.mlp", &Ffn::Moe(case.config))?;
        let values = |name| {
            let rows = positions.iter().flat_map(|position| samples.iter().map(|sample| [*sample, *position]));
            let values = rows.flat_map(|[s, p]| (0..HIDDEN).map(move |feature| element(name, [s, p, feature])));
            TensorData::new(values.collect::<Vec<f64>>(), [positions.len(), samples.len(), HIDDEN])
        };
        let x = Tensor::<3>::from_data(values("x"), (&rank.device.clone().autodiff(), DType::F64)).require_grad();
        let group = rank.group(Axis::Cp);
        let context = (group.size() > 1).then(|| ContextParallel { group, comm: CpCommType::default() });
        let batch = MicroBatch { context, auxiliary: case.auxiliary, ..MicroBatch::default() };
        let y = layer.forward(x.clone(), &norm, &batch);
        let out = host(y.clone());
        let grads = pull_back(y, Tensor::<3>::from_data(values("w"), (&rank.device, DType::F64)));
        let x_grad = host(x.grad(&grads).expect("the input has a gradient"));
        let registry = params.take_registry();
        let mut collect = Collect {
            rank: &rank,
            registry: &registry,
            gradients: &grads,
            dp_ranks: Some(Axis::DpCp),
            locals: Vec::new(),
        };
        norm.visit(&mut collect);
        layer.visit(&mut collect);
        let part = |values| -> Part { (samples.clone(), positions.clone(), values) };
        Ok((part(out), part(x_grad), collect.locals))
    });
    let ranks = ranks.unwrap_or_else(|error| panic!("{layout}: {error}"));
    let locals: Vec<Local> = ranks.iter().flat_map(|(_, _, locals)| locals.clone()).collect();
    let weights = assemble(&locals).into_iter().map(|(name, tensor)| (name, tensor.data)).collect();
    let whole = |pick: fn(&(Part, Part, Vec<Local>)) -> &Part| whole(case.seq, ranks.iter().map(pick));
    (Found { out: whole(|rank| &rank.0), x_grad: whole(|rank| &rank.1), weights }, mesh.axis_size(Axis::Dp))
}

fn samples(rank: &Rank) -> Vec<usize> {
    let each = SAMPLES / rank.mesh.axis_size(Axis::Dp);
    (rank.coords.dp * each..(rank.coords.dp + 1) * each).collect()
}

/// The rank's positions outside tensor parallel regions.
fn positions(rank: &Rank, seq: usize) -> Vec<usize> {
    let (cp, layout) = (rank.mesh.axis_size(Axis::Cp), rank.mesh.layout());
    let of_context = backend_dist::ops::context::zigzag(rank.coords.cp, cp, seq / cp).into_iter().flatten();
    let positions: Vec<usize> = of_context.collect();
    if !layout.sequence_parallel() {
        return positions;
    }
    positions.chunks(positions.len() / layout.tp).nth(rank.coords.tp).expect("a part for each rank").to_vec()
}

/// `[SAMPLES, seq, HIDDEN]` of the ranks' parts, `[positions, samples, HIDDEN]` each. Where several ranks have the same
/// part it is the same.
fn whole<'a>(seq: usize, parts: impl Iterator<Item = &'a Part>) -> Vec<f64> {
    let mut found: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
    for (samples, positions, values) in parts {
        let rows = positions.iter().flat_map(|position| samples.iter().map(move |sample| sample * seq + position));
        for (row, values) in rows.zip(values.chunks(HIDDEN)) {
            let before = found.insert(row, values.to_vec());
            assert!(before.is_none_or(|before| before == values), "ranks differ in row {row}");
        }
    }
    assert_eq!(found.len(), SAMPLES * seq);
    found.into_values().flatten().collect()
}
