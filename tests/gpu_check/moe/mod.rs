//! Checks MoE layers with experts distributed over all GPUs against one CPU rank, and routing on the GPUs against
//! routing on the host; then times layers of usual sizes.
//!
//! `cargo run --release --example moe_check --features cuda -- [GPUS] [layers|routing|times]`; 1, 2, 4 or 8 GPUs;
//! without a word everything. In f32 all values are compared; in bf16 a token whose experts have nearly equal scores
//! may choose others, so a few tokens may differ.

mod routing;

use std::collections::BTreeMap;
use std::time::Instant;

use backend_dist::collective::all_reduce;
use backend_dist::comm::ReduceOp;
use backend_dist::gpu;
use backend_dist::launch::{Rank, launch};
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

fn run(devices: &[Device], mesh: &Mesh, config: MoeConfig, dtype: FloatDType) -> Found {
    run_with(devices, mesh, config, dtype, None)
}

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

fn host<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.into_data().convert::<f64>().try_to_vec().expect("converted to f64")
}

/// Norm of the difference over the norm of the expected values.
fn distance(found: &[f64], expected: &[f64]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
    norm(&mut found.iter().zip(expected).map(|(a, b)| a - b)) / norm(&mut expected.iter().copied()).max(1e-30)
}

/// Prints what was compared and returns 1 if it is too far off.
fn verdict(what: &str, worst: f64, limit: f64) -> usize {
    let good = worst <= limit;
    println!("{what:<64} {worst:.1e} {}", if good { "ok" } else { "BAD" });
    !good as usize
}

fn check(gpus: usize) -> usize {
    let devices: Vec<Device> = (0..gpus).map(Device::cuda).collect();
    let (hidden, intermediate) = (256, 384);
    let one =
        run(&[Device::flex()], &mesh(1, 1), config(hidden, intermediate, Dispatcher::AllToAll, true), FloatDType::F32);
    let mut bad = 0;
    let halves = if gpus > 1 { vec![1, 2] } else { vec![1] };
    for (etp, dispatcher) in
        halves.into_iter().flat_map(|etp| [Dispatcher::AllToAll, Dispatcher::AllGather].map(|d| (etp, d)))
    {
        let config = config(hidden, intermediate, dispatcher, true);
        for (dtype, limits) in [(FloatDType::F32, [1e-4, 1e-3]), (FloatDType::BF16, [0.03, 0.2])] {
            let (out, grads) = run(&devices, &mesh(gpus, etp), config, dtype);
            let mut rows: Vec<f64> =
                out.chunks(hidden).zip(one.0.chunks(hidden)).map(|(a, b)| distance(a, b)).collect();
            rows.sort_by(f64::total_cmp);
            let name = format!("EP{} ETP{etp} {dispatcher:?} {dtype:?}", gpus / etp);
            // In bf16 one token in fifty may use other experts.
            let place = if dtype == FloatDType::F32 { rows.len() - 1 } else { rows.len() * 49 / 50 };
            bad += verdict(&format!("{name}: outputs"), rows[place], limits[0]);
            let off = grads.iter().map(|(name, grad)| (distance(grad, &one.1[name]), name));
            let (worst, of) = off.max_by(|a, b| a.0.total_cmp(&b.0)).expect("a layer has weights");
            bad += verdict(&format!("{name}: gradient of {of}"), worst, limits[1]);
        }
    }
    bad
}

/// Tokens per GPU.
const TOKENS: usize = 4096;

/// Seconds of a layer forward and backward in bf16: the median on the slowest GPU.
fn time(gpus: usize, config: MoeConfig) -> f64 {
    let (devices, hidden): (Vec<Device>, usize) = ((0..gpus).map(Device::cuda).collect(), config.hidden);
    let times = launch(&mesh(gpus, 1), &devices, |rank| {
        let (norm, layer, _) = build(&rank, config, FloatDType::BF16, None);
        let values =
            (0..TOKENS * hidden).map(|i| Init::Normal { std: 1.0 }.value(rank.rank as u64, "x", i as u64) as f32);
        let data = TensorData::new(values.collect::<Vec<f32>>(), [TOKENS, 1, hidden]);
        let x = Tensor::<3>::from_data(data, (&rank.device.clone().autodiff(), DType::BF16)).require_grad();
        let batch = MicroBatch { auxiliary: 1.0, ..MicroBatch::default() };
        // Reading this sum waits for all of the step.
        let step = || {
            let start = Instant::now();
            let y = layer.forward(x.clone(), &norm, &batch);
            let grads = pull_back(y.clone(), y.inner());
            let grad = x.grad(&grads).expect("the input has a gradient");
            grad.sum().into_data();
            start.elapsed().as_secs_f64()
        };
        let mut all: Vec<f64> = (0..20).map(|_| step()).collect();
        all.sort_by(f64::total_cmp);
        Ok(all[all.len() / 2])
    });
    times.unwrap_or_else(|error| panic!("{error}")).into_iter().fold(0.0, f64::max)
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

fn main() {
    let gpus: usize = std::env::args().nth(1).map_or(1, |text| text.parse().expect("GPUS is a number"));
    assert!(gpus.is_power_of_two() && gpus <= 8, "1, 2, 4 or 8 GPUs");
    let part = std::env::args().nth(2);
    let does = |what: &str| part.as_deref().is_none_or(|part| part == what);
    assert!(["layers", "routing", "times"].into_iter().any(does), "{part:?} is not layers, routing or times");
    if let Err(missing) = gpu::require(gpus) {
        eprintln!("{missing}");
        std::process::exit(2);
    }
    let mut bad = if does("layers") { check(gpus) } else { 0 };
    if does("routing") {
        bad += routing::check(gpus);
    }
    if does("times") {
        times(gpus);
        routing::times(gpus);
    }
    if bad > 0 {
        println!("{bad} checks failed");
        std::process::exit(1);
    }
    println!("all layers are right");
}
