//! Trains one device and every candidate on the same random batches, and compares.

use super::compare::Tensors;
use super::{Bounds, Candidate, Job, Line, RankTrace, Reference, TraceError, assemble, compare, trace};
use crate::element::Element;
use crate::engine::{EngineConfig, TokenBatch};
use crate::lr::{LrConfig, LrDecay, Span};
use crate::optim::AdamWConfig;
use backend_dist::comm::RunError;
use backend_dist::launch::{BoxError, Rank};
use backend_dist::ops::fp8::Fp8Recipe;
use backend_dist::process::Cluster;
use backend_dist::shard::{HostTensor, Init};
use burn::tensor::{Device, FloatDType};
use models::layers::moe::RoutingReplay;
use models::lora::BaseFormat;
use models::names::{Foreign, NameMap, fits};
use models::param::ParamBuilder;
use models::{CausalLm, Fp8Config, LoraConfig, LoraPlan, ModelConfig, WeightSource};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

/// What to train in every layout.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Optimizer steps.
    pub steps: usize,
    /// Sequences per step over all ranks.
    pub global_batch: usize,
    /// Tokens of a sequence.
    pub seq: usize,
    /// Seed of weights, tokens and dropout.
    pub seed: u64,
    /// Weights and activations of the layouts: `f64`, `f32` or `bf16`. The one device computes in `f64` from the same
    /// initial weights, rounded to `dtype`.
    pub dtype: FloatDType,
    /// In place of the precision's own: [`Bounds::new`].
    pub tolerance: Option<f64>,
    /// Linear layers of the blocks and experts are in FP8. A scale is that of one micro-batch, so the one device takes
    /// as many of them as a layout; [`different_in_fp8`](super::different_in_fp8) names the layouts that compute other
    /// numbers.
    pub fp8: Option<Fp8Recipe>,
    /// Adapters of all linear layers are trained, of routed experts too; everything else is frozen.
    pub lora: Option<LoraKind>,
    /// How frozen weights are stored, in the layouts and on the one device, if not as all weights.
    pub base: Option<BaseFormat>,
}

/// A kind of adapters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoraKind {
    /// Scale alpha / r
    Lora,
    /// Scale alpha / √r
    Rslora,
    /// Magnitude and direction apart
    Dora,
}

impl LoraKind {
    /// Adapters of rank 16, for which GPUs have kernels, and a scale other than 1 of all linear layers of a model with these
    /// names.
    fn config(self, names: &NameMap) -> LoraConfig {
        let mut config = LoraConfig {
            rank: 16,
            alpha: 32.0,
            rslora: self == Self::Rslora,
            dora: self == Self::Dora,
            ..LoraConfig::default()
        };
        // Experts that are one tensor have no magnitudes.
        let is_expert = |theirs: &Foreign| match theirs.stack {
            Some(_) => self != Self::Dora && fits("*.experts.*_proj", &theirs.name),
            None => fits("*.experts.*.weight", &theirs.name),
        };
        let has_experts = names.iter().any(|(_, theirs)| is_expert(theirs));
        config.target_modules.extend(has_experts.then(|| "experts.*".into()));
        config
    }
}

impl Settings {
    /// Random batches for a vocabulary; about one token in eight does not count in the loss, so that a wrong count
    /// shows.
    pub fn job(&self, vocab_size: usize) -> Job {
        let draw =
            |name: &str, index: usize| Init::Uniform { low: 0.0, high: 1.0 }.value(self.seed, name, index as u64);
        let batch = |step: usize| {
            let ids: Vec<i64> = (0..self.global_batch * (self.seq + 1))
                .map(|index| (draw(&format!("tokens {step}"), index) * vocab_size as f64) as i64)
                .collect();
            let mask = (0..self.global_batch * self.seq).map(|index| draw(&format!("mask {step}"), index) < 0.875);
            TokenBatch { mask: Some(mask.collect()), ..TokenBatch::from_sequences(&ids, self.seq) }
        };
        Job { engine: self.engine(), batches: (0..self.steps).map(batch).collect(), routing: None }
    }

    /// Warm-up, decay and clipping are all in use.
    ///
    /// Below double precision AdamW's epsilon is large: the usual one divides the smallest gradients by their own size,
    /// so that the sign of a rounding error moves a weight by twice the learning rate, and says nothing about the
    /// layout. In bf16 the rate is large too, so that an update is more than the rounding of weights.
    fn engine(&self) -> EngineConfig {
        let scale = if self.dtype == FloatDType::BF16 { 20.0 } else { 1.0 };
        let eps = if self.dtype == FloatDType::F64 { AdamWConfig::default().eps } else { 1e-3 };
        let lr = LrConfig {
            max: scale * 1e-3,
            min: scale * 1e-4,
            init: scale * 5e-4,
            warmup: Span::Steps(1),
            decay: Span::Steps(self.steps as u64 + 2),
            form: LrDecay::Cosine,
        };
        EngineConfig {
            optimizer: AdamWConfig { beta2: 0.95, weight_decay: 0.1, eps, ..AdamWConfig::default() }.into(),
            clip: Some(0.5),
            seed: self.seed,
            ..EngineConfig::new(self.global_batch, self.global_batch, lr)
        }
    }
}

/// Trains `config` in double precision on one CPU device and, on `cluster` in the precision of `settings`, in every
/// candidate layout; `on_line` is called with the result of each. Every process of the cluster trains the one device,
/// and has the whole result.
///
/// In bf16 tokens use the experts that they use on the one device: which of two nearly equal experts is chosen is not
/// decided by rounding then. [`Line::rerouted`] says how many tokens would have used others. Fails if the one device
/// cannot be run, or a process of the cluster is gone. A layout that differs, is refused or fails is a line of the
/// result.
pub fn verify<M: CausalLm>(
    config: &M::Config,
    settings: &Settings,
    cluster: &Cluster,
    candidates: &[Candidate],
    mut on_line: impl FnMut(&Line),
) -> Result<Vec<Line>, TraceError> {
    let routing = (settings.dtype == FloatDType::BF16).then(RoutingReplay::recording);
    let job = Job { routing: routing.clone(), ..settings.job(config.vocab_size()) };
    let dims = config.dims();
    let lora = plan::<M>(config, settings)?;
    let initial = initial::<M>(config, settings)?;
    let (format, none, blocks) = (settings.fp8.map(|recipe| recipe.format), Fp8Config::default(), dims.layers);
    let recipe = settings.fp8.map_or(none.recipe, |recipe| recipe.scaling);
    let fp8 = Fp8Config { format, recipe, ..none };
    let build = |dtype, candidate: &Candidate| {
        let (recompute, overlap, initial, fp8) = (candidate.recompute.clone(), candidate.moe_overlap, &initial, &fp8);
        let lora = lora.clone();
        move |rank: &Rank, part| {
            let params = ParamBuilder::new(rank, dtype, settings.seed).with_source(initial).with_part(part);
            let params = params.with_fp8(fp8, blocks);
            let params = params.with_recompute(&recompute).with_moe_comm_overlap(overlap, Some(2));
            adapted::<M>(config, params.with_base(settings.base), &lora, Some(initial))
        }
    };
    let one_device = |micro_batches: usize| {
        let single = Candidate { accumulation: micro_batches, ..Candidate::default() };
        trace(&single, &job, &[Device::flex()].into(), &dims, build(FloatDType::F64, &single))
    };
    let one = one_device(1)?;
    // Modules of multi-token prediction are layers after the last one.
    let layers = one[0].parameters.iter().filter_map(|local| local.unit.layer()).max().map_or(0, |last| last + 1);
    let bounds = Bounds::new(settings.dtype, settings.tolerance, layers);
    let reference = |one: &[RankTrace]| Ok::<_, TraceError>(Reference::new(&one[0])?.from_initial(initial.clone()));
    let mut references = BTreeMap::from([(1, reference(&one)?)]);
    let mut lines = Vec::with_capacity(candidates.len());
    for candidate in candidates {
        let micro_batches = if settings.fp8.is_some() { candidate.layout.dp * candidate.accumulation } else { 1 };
        let one = match references.entry(micro_batches) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => place.insert(reference(&one_device(micro_batches)?)?),
        };
        let routing = routing.as_ref().map(RoutingReplay::following);
        let job = Job { routing: routing.clone(), ..job.clone() };
        let ranks = match trace(candidate, &job, cluster, &dims, build(settings.dtype, candidate)) {
            // Without that process no other layout can be tried.
            Err(error) if cluster.check().is_err() => return Err(error),
            ranks => ranks,
        };
        let line = Line {
            candidate: candidate.clone(),
            outcome: ranks.map(|ranks| compare(one, &ranks, &bounds)).map_err(|error| error.to_string()),
            rerouted: routing.map_or(Ok(0.0), |routing| rerouted(&routing, cluster))?,
        };
        on_line(&line);
        lines.push(line);
    }
    Ok(lines)
}

/// The share of the choices of experts, on all ranks of all processes, that would have been others.
fn rerouted(routing: &RoutingReplay, cluster: &Cluster) -> Result<f64, RunError> {
    let counts = cluster.all_gather(routing.followed())?;
    let sum = |index: usize| counts.iter().map(|of_process| of_process[index]).sum::<u64>();
    Ok(sum(1) as f64 / sum(0).max(1) as f64)
}

/// The random initial weights of the whole model, each rounded once to the precision of `settings`.
pub(super) fn initial<M: CausalLm>(config: &M::Config, settings: &Settings) -> Result<Tensors, TraceError> {
    let job = Job { engine: settings.engine(), batches: Vec::new(), routing: None };
    let lora = plan::<M>(config, settings)?;
    let build = |rank: &Rank, part| {
        adapted::<M>(config, ParamBuilder::new(rank, FloatDType::F64, settings.seed).with_part(part), &lora, None)
    };
    let one = trace(&Candidate::default(), &job, &[Device::flex()].into(), &config.dims(), build)?;
    let element = match settings.dtype {
        FloatDType::F32 => Element::F32,
        FloatDType::BF16 => Element::Bf16,
        _ => Element::F64,
    };
    let round = |tensor: HostTensor| {
        let mut bytes = Vec::with_capacity(tensor.data.len() * element.size());
        element.encode(&tensor.data, &mut bytes);
        HostTensor { data: element.decode(&bytes), ..tensor }
    };
    let spread = |(name, tensor): (String, HostTensor)| {
        // B starts at zero, and A has no gradient then.
        let is_b = name.ends_with("lora_B.weight");
        let value = |index: usize| Init::Normal { std: 0.05 }.value(settings.seed, &name, index as u64);
        let data = if is_b { (0..tensor.data.len()).map(value).collect() } else { tensor.data };
        (name, round(HostTensor { data, ..tensor }))
    };
    Ok(assemble(&one[0].parameters)?.into_iter().map(spread).collect())
}

/// Which layers have adapters, if there are any.
fn plan<M: CausalLm>(config: &M::Config, settings: &Settings) -> Result<Option<Arc<LoraPlan>>, TraceError> {
    let names = config.hf_names();
    settings.base.map(|base| base.check(&names, [1, 1])).transpose()?;
    let plan = settings.lora.map(|kind| kind.config(&names).plan(&names)).transpose()?;
    Ok(plan.map(Arc::new))
}

/// A stage, with adapters where there are any.
fn adapted<M: CausalLm>(
    config: &M::Config,
    params: ParamBuilder,
    lora: &Option<Arc<LoraPlan>>,
    source: Option<&Tensors>,
) -> Result<M, BoxError> {
    let Some(plan) = lora else { return Ok(M::build(config, params)?) };
    let model = M::build(config, params.with_lora(plan, source.map(|source| source as &dyn WeightSource)))?;
    plan.check(model.registry())?;
    Ok(model)
}
