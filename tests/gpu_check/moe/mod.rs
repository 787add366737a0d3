//! MoE layers with experts distributed over all GPUs against one CPU rank, and routing on the GPUs against routing on
//! the host; times of layers of usual sizes.
//!
//! 1, 2, 4 or 8 GPUs. In f32 all values are compared; in bf16 a token whose experts have nearly equal scores may choose
//! others, so a few tokens may differ.

mod routing;

use crate::choice::Choice;
use crate::clock::on_rank;
use crate::numbers::{host, relative};
use crate::ranks::slowest;
use crate::report::Report;
use backend_dist::collective::all_reduce;
use backend_dist::comm::ReduceOp;
use backend_dist::launch::{BoxError, Rank, launch};
use backend_dist::mesh::{Axis, GridKind, Mesh, ParallelLayout};
use backend_dist::ops::pull_back;
use backend_dist::shard::{Init, ParamSpec, Registry, Unit};
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{DType, Device, FloatDType, Gradients, Tensor, TensorData};
use models::layers::{
    Balance, BalanceOver, Dispatcher, ExpertKind, FeedForward, Ffn, MoeConfig, Norm, NormKind, RouterConfig,
    SharedExperts,
};
use models::{MicroBatch, ParamBuilder, WeightSource};
use std::collections::BTreeMap;

/// Samples of all ranks.
const SAMPLES: usize = 8;
const SEQ: usize = 96;

fn config(hidden: usize, intermediate: usize, dispatcher: Dispatcher, shared: bool) -> MoeConfig {
    let balance = Some(Balance { over: BalanceOver::Sequence, coefficient: 0.01 });
    MoeConfig {
        hidden,
        intermediate,
        experts: 8,
        kind: ExpertKind::SwiGlu,
        router: RouterConfig { balance, z_loss: 1e-3, ..RouterConfig::new(2) },
        capacity: None,
        dispatcher,
        shared: shared.then_some(SharedExperts { intermediate, gate: true }),
        input: Init::Normal { std: 0.05 },
        output: Init::Normal { std: 0.05 },
    }
}

fn mesh(ranks: usize, etp: usize) -> Mesh {
    let layout = ParallelLayout { dp: ranks, ep: ranks / etp, etp: Some(etp), ..Default::default() };
    Mesh::new(layout).expect("experts are divided over all ranks")
}

fn build(
    rank: &Rank,
    config: MoeConfig,
    dtype: FloatDType,
    source: Option<&dyn WeightSource>,
) -> (Norm, FeedForward, Registry) {
    let mut params = ParamBuilder::new(rank, dtype, 3);
    if let Some(source) = source {
        params = params.with_source(source);
    }
    params.begin(Unit::Layer(0));
    let norm = Norm::new(&mut params, "norm", config.hidden, NormKind::Rms, 1e-5).expect("a new builder");
    let layer = FeedForward::new(&mut params, "mlp", &Ffn::Moe(config)).expect("a legal layer");
    (norm, layer, params.take_registry())
}

/// Outputs by sample, and gradients by name.
type Found = (Vec<f64>, BTreeMap<String, Vec<f64>>);

/// With weights from `source`, else random ones.
fn run_with(
    devices: &[Device],
    mesh: &Mesh,
    config: MoeConfig,
    dtype: FloatDType,
    source: Option<&dyn WeightSource>,
) -> Found {
    let ranks = launch(mesh, devices, |rank| {
        let (norm, layer, registry) = build(&rank, config, dtype, source);
        let each = SAMPLES / mesh.axis_size(Axis::Dp);
        let first = rank.coords.dp * each;
        let values = |name: &str| {
            let noise = Init::Normal { std: 1.0 };
            let at = |index: usize| {
                let (position, sample) = (index / config.hidden / each, index / config.hidden % each + first);
                ((sample * SEQ + position) * config.hidden + index % config.hidden) as u64
            };
            let values = (0..SEQ * each * config.hidden).map(|index| noise.value(5, name, at(index)));
            TensorData::new(values.collect::<Vec<f64>>(), [SEQ, each, config.hidden])
        };
        let dtype = DType::from(dtype);
        let x = Tensor::<3>::from_data(values("x"), (&rank.device.clone().autodiff(), dtype)).require_grad();
        // The mean over a micro-batch counts less the more micro-batches there are.
        let batch = MicroBatch { auxiliary: each as f64, ..MicroBatch::default() };
        let y = layer.forward(x, &norm, &batch);
        let out = host(y.clone().swap_dims(0, 1));
        let grads = pull_back(y, Tensor::<3>::from_data(values("w"), (&rank.device, dtype)));
        let mut collect = Collect { rank: &rank, registry: &registry, grads: &grads, locals: Vec::new() };
        norm.visit(&mut collect);
        layer.visit(&mut collect);
        Ok((out, collect.locals))
    });
    let ranks = ranks.unwrap_or_else(|error| panic!("{error}"));
    let slices = ranks.iter().flat_map(|(_, locals)| locals).flat_map(|(spec, local)| spec.sections_of(local));
    let grads = Registry::assemble(slices).expect("every section has one owner");
    let out = ranks.iter().flat_map(|(out, _)| out.clone()).collect();
    (out, grads.into_iter().map(|(name, tensor)| (name, tensor.data)).collect())
}

struct Collect<'a> {
    rank: &'a Rank,
    registry: &'a Registry,
    grads: &'a Gradients,
    locals: Vec<(ParamSpec, Vec<f64>)>,
}

impl ModuleVisitor for Collect<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let spec = self.registry.get(param.id.val()).expect("every parameter is registered");
        if !spec.trained {
            return;
        }
        let grad = param.val().grad(self.grads).unwrap_or_else(|| panic!("{} has no gradient", spec.name()));
        let dense = spec.unit.grid() == GridKind::Dense;
        let dp_ranks = if dense { Axis::DpCp } else { Axis::Edp };
        let grad = host(all_reduce(grad.cast(DType::F32), ReduceOp::Sum, &self.rank.group(dp_ranks)));
        let dp_rank = if dense { self.rank.coords.dp } else { self.rank.coords.edp };
        if dp_rank == 0 {
            self.locals.push((spec.clone(), grad));
        }
    }
}

fn check(gpus: usize, report: &mut Report) {
    let devices: Vec<Device> = (0..gpus).map(Device::cuda).collect();
    let (hidden, intermediate) = (256, 384);
    let alone = config(hidden, intermediate, Dispatcher::AllToAll, true);
    let one = run_with(&[Device::flex()], &mesh(1, 1), alone, FloatDType::F32, None);
    let halves = if gpus > 1 { vec![1, 2] } else { vec![1] };
    for (etp, dispatcher) in
        halves.into_iter().flat_map(|etp| [Dispatcher::AllToAll, Dispatcher::AllGather].map(|d| (etp, d)))
    {
        let config = config(hidden, intermediate, dispatcher, true);
        for (dtype, limits) in [(FloatDType::F32, [1e-4, 1e-3]), (FloatDType::BF16, [0.03, 0.2])] {
            let (out, grads) = run_with(&devices, &mesh(gpus, etp), config, dtype, None);
            let mut rows: Vec<f64> =
                out.chunks(hidden).zip(one.0.chunks(hidden)).map(|(a, b)| relative(a, b)).collect();
            rows.sort_by(f64::total_cmp);
            let name = format!("EP{} ETP{etp} {dispatcher:?} {dtype:?}", gpus / etp);
            // In bf16 one token in fifty may use other experts.
            let place = if dtype == FloatDType::F32 { rows.len() - 1 } else { rows.len() * 49 / 50 };
            report.error(format!("{name}: outputs"), rows[place], limits[0]);
            let off = grads.iter().map(|(name, grad)| (relative(grad, &one.1[name]), name));
            let (worst, of) = off.max_by(|a, b| a.0.total_cmp(&b.0)).expect("a layer has weights");
            report.error(format!("{name}: gradient of {of}"), worst, limits[1]);
        }
    }
}

/// Tokens per GPU.
const TOKENS: usize = 4096;

/// Seconds of a layer forward and backward in bf16 on the slowest GPU.
fn time(gpus: usize, config: MoeConfig) -> f64 {
    let (devices, hidden): (Vec<Device>, usize) = ((0..gpus).map(Device::cuda).collect(), config.hidden);
    let times = launch(&mesh(gpus, 1), &devices, |rank| {
        let (norm, layer, _) = build(&rank, config, FloatDType::BF16, None);
        let values =
            (0..TOKENS * hidden).map(|i| Init::Normal { std: 1.0 }.value(rank.rank as u64, "x", i as u64) as f32);
        let data = TensorData::new(values.collect::<Vec<f32>>(), [TOKENS, 1, hidden]);
        let x = Tensor::<3>::from_data(data, (&rank.device.clone().autodiff(), DType::BF16)).require_grad();
        let batch = MicroBatch { auxiliary: 1.0, ..MicroBatch::default() };
        let step = || {
            let y = layer.forward(x.clone(), &norm, &batch);
            let grads = pull_back(y.clone(), y.inner());
            // Reading this sum waits for all of the step.
            x.grad(&grads).expect("the input has a gradient").sum().into_data();
        };
        (0..3).for_each(|_| step());
        Ok(on_rank(&rank, &rank.group(Axis::Dp), 4, step).done)
    });
    slowest(&times.unwrap_or_else(|error| panic!("{error}")), |seconds| *seconds)
}

/// A layer of Mixtral 8x7B with both dispatchers.
fn times(gpus: usize) {
    for dispatcher in [Dispatcher::AllToAll, Dispatcher::AllGather] {
        let time = time(gpus, config(4096, 14_336, dispatcher, false));
        // Two experts per token, three matrices, three GEMMs each (forward, input gradient, weight gradient).
        let flops = (TOKENS * 2 * 3 * 4096 * 14_336 * 6) as f64;
        let speed = flops / time / 1e12;
        println!("EP{gpus} {dispatcher:?}: forward and backward {:.2} ms, {speed:.0} TFLOP/s a GPU", 1e3 * time);
    }
}

pub fn run(choice: &Choice, report: &mut Report) -> Result<(), BoxError> {
    let gpus = choice.numbers[0];
    if !gpus.is_power_of_two() || gpus > 8 {
        return Err(format!("{gpus} GPUs: it takes 1, 2, 4 or 8").into());
    }
    if choice.does("layers") {
        check(gpus, report);
    }
    if choice.does("routing") {
        routing::check(gpus, report);
    }
    if choice.does("times") {
        times(gpus);
        routing::times(gpus);
    }
    Ok(())
}
