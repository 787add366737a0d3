//! Runs a model in a layout, and puts losses, logits, weights and gradients together as global tensors.

use std::collections::BTreeMap;
use std::ops::Range;

use backend_dist::collective::all_reduce;
use backend_dist::comm::ReduceOp;
use backend_dist::launch::{BoxError, Rank, launch};
use backend_dist::mesh::{Axis, GridKind, Mesh};
use backend_dist::ops::{HandOvers, PassContext};
use backend_dist::shard::{HostTensor, Init, ParamSpec, Registry, Section};
use burn::module::{ModuleVisitor, Param};
use burn::tensor::{Device, FloatDType, Gradients, Int, Tensor, TensorData};
use models::MicroBatch;
use models::layers::DropoutKey;
use models::layers::moe::{RouterRecords, RoutingReplay};
use models::{CausalLm, ModelConfig, ParamBuilder, WeightSource};

pub const BATCH: usize = 3;
pub const SEQ: usize = 16;

/// Every global tensor is noise, biases and norms included, so that no term of a formula is zero or one by chance.
pub struct Noise;

impl WeightSource for Noise {
    fn read(&self, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<Vec<f64>, BoxError> {
        let init = Init::Normal { std: 0.3 };
        let data = (0..shape.iter().product::<usize>()).map(|index| init.value(5, name, index as u64)).collect();
        Ok(HostTensor { shape: shape.to_vec(), data }.read_box(ranges))
    }
}

/// What must not depend on the layout.
pub struct Outcome {
    pub losses: Vec<f64>,
    pub logits: Vec<f64>,
    pub gradients: BTreeMap<String, HostTensor>,
}

/// One parameter of one rank: its spec and its values.
pub type Local = (ParamSpec, Vec<f64>);

/// A micro-batch, `[samples, seq]` each; `weights` multiply the losses before they are summed.
pub struct Batch {
    pub samples: usize,
    pub tokens: Vec<i64>,
    pub labels: Vec<i64>,
    pub weights: Vec<f64>,
    /// Records the experts of all tokens, or replays them.
    pub routing: Option<RoutingReplay>,
}

impl Batch {
    /// Another weight for every token, so that errors cannot cancel.
    pub fn synthetic(vocab: usize) -> Self {
        Self {
            samples: BATCH,
            tokens: ids(vocab, 1),
            labels: ids(vocab, 2),
            weights: (0..BATCH * SEQ).map(|index| (index as f64).sin()).collect(),
            routing: None,
        }
    }

    pub fn ids(&self, ids: &[i64], device: &Device) -> Tensor<2, Int> {
        Tensor::from_data(TensorData::new(ids.to_vec(), [self.samples, ids.len() / self.samples]), device)
    }
}

/// A model with noise for weights on a synthetic batch.
pub fn run<M: CausalLm>(config: &M::Config, layout: &str, dropout: Option<DropoutKey>) -> Outcome {
    let batch = Batch::synthetic(config.vocab_size());
    run_on::<M>(config, layout, FloatDType::F64, &Noise, &batch, dropout, |params| params)
}

/// Losses, logits and finished gradients of a model of type `dtype`.
pub fn run_on<M: CausalLm>(
    config: &M::Config,
    layout: &str,
    dtype: FloatDType,
    source: &dyn WeightSource,
    batch: &Batch,
    dropout: Option<DropoutKey>,
    how: impl Fn(ParamBuilder<'_>) -> ParamBuilder<'_> + Sync,
) -> Outcome {
    let mesh = Mesh::new(layout.parse().unwrap()).unwrap();
    let on_rank = |rank: Rank| {
        let model = M::build(config, how(ParamBuilder::new(&rank, dtype, 0).with_source(source)))?;
        let device = rank.device.clone().autodiff();
        let (tokens, labels) = (batch.ids(&batch.tokens, &device), batch.ids(&batch.labels, &device));
        let routers = RouterRecords { replay: batch.routing.clone(), ..RouterRecords::default() };
        let hand_overs = HandOvers::counted();
        let pass = PassContext { hand_overs: hand_overs.clone(), ..PassContext::default() };
        let of = |dropout| {
            let (pass, routers) = (pass.clone(), routers.clone());
            MicroBatch { pass, routers, ..MicroBatch::with_dropout(dropout) }
        };
        let logits = host(model.head_logits(model.hidden_states(tokens.clone(), &of(None))));
        let losses = model.training_losses(tokens, labels, &of(dropout));
        let weights = TensorData::new(batch.weights.clone(), losses.dims());
        let weights = Tensor::from_data(weights, (&device, losses.dtype()));
        let (host_losses, total) = (host(losses.clone()), (losses * weights).sum());
        let gradients = total.backward();
        drop(total);
        assert_eq!(hand_overs.missed(), 0, "operations have not found each other's values");
        let mut collect = Collect {
            rank: &rank,
            registry: model.registry(),
            gradients: &gradients,
            dp_ranks: None,
            locals: Vec::new(),
        };
        model.visit(&mut collect);
        Ok((host_losses, logits, collect.locals))
    };
    let ranks = launch(&mesh, &[Device::flex()], on_rank).unwrap_or_else(|error| panic!("{layout}: {error}"));
    for (losses, logits, _) in &ranks {
        assert_eq!((losses, logits), (&ranks[0].0, &ranks[0].1), "{layout}: all ranks have the same losses and logits");
    }
    let locals: Vec<Local> = ranks.iter().flat_map(|(_, _, locals)| locals.clone()).collect();
    let (losses, logits, _) = ranks.into_iter().next().unwrap();
    Outcome { losses, logits, gradients: assemble(&locals) }
}

/// Losses of a model that records gradients and of its copy that does not: training, evaluation, training, evaluation.
pub fn alternating_losses<M: CausalLm>(config: &M::Config) -> [Vec<f64>; 4] {
    let rank = Rank::single(Device::flex());
    let model = M::build(config, ParamBuilder::new(&rank, FloatDType::F64, 0).with_source(&Noise)).unwrap();
    let batch = Batch::synthetic(config.vocab_size());
    let losses = |model: &M, device: &Device| {
        let losses = model.token_losses(batch.ids(&batch.tokens, device), batch.ids(&batch.labels, device));
        assert_eq!(losses.is_autodiff(), device.is_autodiff());
        host(losses)
    };
    let (plain, autodiff) = (rank.device.clone(), rank.device.autodiff());
    let evaluated = model.valid();
    [losses(&model, &autodiff), losses(&evaluated, &plain), losses(&model, &autodiff), losses(&evaluated, &plain)]
}

/// The randomly initialised weights of a model.
pub fn initial_weights<M: CausalLm>(config: &M::Config, layout: &str, seed: u64) -> BTreeMap<String, HostTensor> {
    let mesh = Mesh::new(layout.parse().unwrap()).unwrap();
    let ranks = launch(&mesh, &[Device::flex()], |rank: Rank| {
        let model = M::build(config, ParamBuilder::new(&rank, FloatDType::F32, seed))?;
        let mut values = Values { registry: model.registry(), locals: Vec::new() };
        model.visit(&mut values);
        Ok(values.locals)
    });
    assemble(&ranks.unwrap().concat())
}

pub fn assemble(locals: &[Local]) -> BTreeMap<String, HostTensor> {
    let slices: Vec<(&Section, &[f64])> = locals.iter().flat_map(|(spec, local)| spec.sections_of(local)).collect();
    let globals = Registry::assemble(slices.iter().copied()).unwrap();
    for (section, local) in slices {
        // Copies that nobody owns are the same, and padding is zero.
        assert_close(&section.name, local, &section.slice(&globals[&section.name].data), 1e-12);
    }
    globals
}

pub fn host<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.into_data().convert::<f64>().try_to_vec::<f64>().unwrap()
}

fn ids(vocab: usize, stream: usize) -> Vec<i64> {
    (0..BATCH * SEQ).map(|index| ((index * 7919 + stream * 104_729) % vocab) as i64).collect()
}

/// The largest difference, relative to the largest expected value, is at most `limit`.
pub fn assert_close(what: &str, found: &[f64], expected: &[f64], limit: f64) {
    assert_within(what, found, expected, limit, 0.0);
}

/// Like [`assert_close`], but relative to `floor` where all expected values are smaller.
pub fn assert_within(what: &str, found: &[f64], expected: &[f64], limit: f64, floor: f64) {
    assert_eq!(found.len(), expected.len(), "{what}: number of elements");
    assert!(found.iter().all(|value| value.is_finite()), "{what}: not finite");
    let worst = found.iter().zip(expected).fold(0.0, |worst: f64, (a, b)| worst.max((a - b).abs()));
    let scale = largest(expected).max(floor);
    assert!(worst <= limit * scale, "{what}: differs by {worst:e}, largest value {scale:e}");
}

/// The largest absolute value.
pub fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |largest, value| largest.max(value.abs()))
}

/// Every parameter's gradient, with the sums over neighbours that its spec asks for.
pub struct Collect<'a> {
    pub rank: &'a Rank,
    pub registry: &'a Registry,
    pub gradients: &'a Gradients,
    /// The ranks that see other sequences, unless all see the same. Ranks that hold the same experts always see other
    /// tokens.
    pub dp_ranks: Option<Axis>,
    pub locals: Vec<Local>,
}

impl ModuleVisitor for Collect<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let spec = self.registry.get(param.id.val()).expect("every parameter is registered");
        if !spec.trained {
            return;
        }
        let gradient = param.val().grad(self.gradients).unwrap_or_else(|| panic!("{} has no gradient", spec.name()));
        let dp_ranks = match spec.unit.grid() {
            GridKind::Dense => self.dp_ranks,
            GridKind::Expert => Some(Axis::Edp),
        };
        let gradient = match dp_ranks.map(|axis| self.rank.group(axis)) {
            Some(group) => {
                let sum = all_reduce(gradient, ReduceOp::Sum, &group);
                if group.rank() > 0 {
                    return;
                }
                sum
            }
            None => gradient,
        };
        let mut local = host(gradient.clone());
        for sum in spec.gradient_sums() {
            let group = self.rank.subgroup(Axis::Tp, sum.ranks);
            let [count] = [sum.elements.len()];
            let part = gradient.clone().reshape([spec.local_len()]).narrow(0, sum.elements.start, count);
            local[sum.elements].copy_from_slice(&host(all_reduce(part, ReduceOp::Sum, &group)));
        }
        self.locals.push((spec.clone(), local));
    }
}

struct Values<'a> {
    registry: &'a Registry,
    locals: Vec<Local>,
}

impl ModuleVisitor for Values<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let spec = self.registry.get(param.id.val()).expect("every parameter is registered");
        self.locals.push((spec.clone(), host(param.val())));
    }
}
