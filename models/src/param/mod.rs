//! Creates a rank's parameters and records what each of them is a slice of.
//!
//! Here is what a [`ParamBuilder`] knows; `kinds` has the parameters that it makes, `adapters` those next to frozen ones,
//! `frozen` which are frozen by name, `shared` those that another model has already, `values` their initial values and where these come from when they are not random,
//! `fp8` the FP8 side of layers, `place` the rank's coordinates among those that share layers.

mod adapters;
mod error;
mod fp8;
mod frozen;
mod kinds;
mod place;
mod shared;
mod values;

pub use backend_dist::shard::WeightSource;
pub use error::{BuildError, Result};
pub use place::{ExpertParallel, TensorParallel};

use std::cell::Cell;

use backend_dist::comm::Group;
use backend_dist::launch::Rank;
use backend_dist::mesh::Axis;
use backend_dist::ops::LOGITS_AT_ONCE;
use backend_dist::ops::fp8::Fp8Layers;
use backend_dist::shard::{GroupPosition, Registry, Unit};
use burn::tensor::{Device, FloatDType};

use crate::lora::BaseFormat;
use crate::observer::{InputObserver, ObservedInput};
use crate::part::Part;
use crate::recompute::Recompute;

/// Creates parameters for one rank: random values that do not depend on the layout, or a source's values, under stable
/// ids, each recorded in the [`Registry`].
///
/// ```
/// use backend_dist::launch::{BoxError, launch};
/// use backend_dist::mesh::Mesh;
/// use burn::tensor::{Device, FloatDType};
/// use models::{CausalLm, Llama, LlamaConfig, ParamBuilder};
///
/// // Parameters on each of two tensor parallel ranks, of a model that they share.
/// let held = launch(&Mesh::new("TP2".parse()?)?, &[Device::flex()], |rank| {
///     let model = Llama::build(&LlamaConfig::tiny(), ParamBuilder::new(&rank, FloatDType::F32, 1234))?;
///     Ok(model.registry().iter().map(|spec| spec.local_len()).sum::<usize>())
/// })?;
/// let whole = models::ModelConfig::parameter_count(&LlamaConfig::tiny());
/// assert!(held[0] == held[1] && held[0] > whole / 2 && held[0] < whole);
/// # Ok::<(), BoxError>(())
/// ```
pub struct ParamBuilder<'a> {
    parallel: TensorParallel,
    experts: ExpertParallel,
    device: Device,
    dtype: FloatDType,
    seed: u64,
    source: Option<&'a dyn WeightSource>,
    /// Bytes of `source` that may not be on the device yet.
    ahead: Cell<usize>,
    fp32_norms: bool,
    part: Option<Part>,
    unit: Unit,
    recompute: Recompute,
    lora: Option<adapters::Adapters<'a>>,
    base: Option<BaseFormat>,
    shared: shared::Shared,
    observer: Option<InputObserver>,
    /// Patterns of the names of frozen parameters.
    frozen: Vec<String>,
    fp8: Option<fp8::Fp8Selection>,
    /// Those that were built.
    fp8_layers: Fp8Layers,
    /// That share the work of drawing: of dense parameters, and of experts.
    dp_ranks: [Option<Group>; 2],
    expert_dp_ranks: Group,
    /// Ranks that share sequences.
    context_parallel: usize,
    /// All ranks that build the same layers.
    stage: Group,
    registry: Registry,
}

impl<'a> ParamBuilder<'a> {
    /// Random parameters of `dtype` on the rank's device, tracked by autodiff. Equal seeds give equal global tensors
    /// in every layout.
    pub fn new(rank: &Rank, dtype: FloatDType, seed: u64) -> Self {
        Self {
            parallel: TensorParallel {
                group: rank.group(Axis::Tp),
                sequence: rank.mesh.layout().sequence_parallel(),
                overlap: true,
                logits_at_once: LOGITS_AT_ONCE,
            },
            experts: ExpertParallel::of(rank),
            device: rank.device.clone().autodiff(),
            dtype,
            seed,
            source: None,
            ahead: Cell::new(0),
            fp32_norms: false,
            part: None,
            unit: Unit::default(),
            recompute: Recompute::default(),
            lora: None,
            base: None,
            shared: shared::Shared::new(),
            observer: None,
            frozen: Vec::new(),
            fp8: None,
            fp8_layers: Fp8Layers::default(),
            dp_ranks: [None, None],
            expert_dp_ranks: rank.group(Axis::Edp),
            context_parallel: rank.mesh.axis_size(Axis::Cp),
            stage: rank.group(Axis::TpDpCp),
            registry: Registry::default(),
        }
    }

    /// The ranks of `dp_ranks` build the same parameters at the same time and share the work of drawing random values,
    /// as those that hold the same experts do.
    pub fn with_dp_ranks(mut self, dp_ranks: Group) -> Self {
        // Between processes, drawing is faster than sending.
        self.dp_ranks = [dp_ranks, self.expert_dp_ranks.clone()]
            .map(|dp_ranks| Some(dp_ranks).filter(|dp_ranks| dp_ranks.size() > 1 && dp_ranks.is_in_one_process()));
        self
    }

    /// Takes every value from `source` instead of random numbers.
    pub fn with_source(mut self, source: &'a dyn WeightSource) -> Self {
        self.source = Some(source);
        self
    }

    /// Only this part of the model is built, as a pipeline stage.
    pub fn with_part(mut self, part: Part) -> Self {
        self.part = Some(part);
        self
    }

    /// The part to build; `None` is the whole model.
    pub fn part(&self) -> Option<&Part> {
        self.part.as_ref()
    }

    /// The part to build of a model of `layers` layers.
    pub fn part_of(&self, layers: usize) -> Part {
        self.part.clone().unwrap_or_else(|| Part::whole(layers))
    }

    /// What is created from here on belongs to `unit`.
    pub fn begin(&mut self, unit: Unit) {
        self.unit = unit;
    }

    /// What [`begin`](Self::begin) began.
    pub fn unit(&self) -> Unit {
        self.unit
    }

    /// Linear layers record what their inputs are like.
    pub fn with_observer(mut self, observer: InputObserver) -> Self {
        self.observer = Some(observer);
        self
    }

    /// What a linear layer with these outputs records.
    pub(crate) fn observed<'n>(&self, names: impl Iterator<Item = &'n str>) -> Option<ObservedInput> {
        self.observer.as_ref()?.of(names)
    }

    /// Creates parameters without autodiff, for evaluation and generation only.
    pub fn without_autodiff(mut self) -> Self {
        self.device = self.device.without_autodiff();
        self
    }

    /// Norms without a bias round to fp32 although the parameters are `f64`, as in Hugging Face transformers.
    pub fn with_fp32_norms(mut self) -> Self {
        self.fp32_norms = true;
        self
    }

    /// Whether [`ParamBuilder::with_fp32_norms`] was asked for.
    pub fn has_fp32_norms(&self) -> bool {
        self.fp32_norms
    }

    /// Layers drop the outputs of the modules of selective recomputation and recompute them in the backward pass.
    ///
    /// ```
    /// use backend_dist::launch::{BoxError, Rank};
    /// use burn::tensor::{Device, FloatDType, Int, Tensor};
    /// use models::recompute::Module;
    /// use models::{CausalLm, Llama, LlamaConfig, ParamBuilder, Recompute};
    ///
    /// let rank = Rank::single(Device::flex());
    /// let recompute = Recompute::selective(&[Module::CoreAttention, Module::Norms]);
    /// let loss = |recompute: &Recompute| -> Result<f32, BoxError> {
    ///     let params = ParamBuilder::new(&rank, FloatDType::F32, 1).with_recompute(recompute);
    ///     let model = Llama::build(&LlamaConfig::tiny(), params)?;
    ///     let tensor = |ids: [i64; 3]| Tensor::<2, Int>::from_data([ids], &rank.device);
    ///     Ok(model.token_losses(tensor([1, 2, 3]), tensor([2, 3, 4])).sum().into_scalar::<f32>())
    /// };
    /// assert_eq!(loss(&recompute)?, loss(&Recompute::default())?);
    /// # Ok::<(), BoxError>(())
    /// ```
    pub fn with_recompute(mut self, recompute: &Recompute) -> Self {
        self.recompute = recompute.clone();
        self
    }

    /// Whether collectives of tensor parallelism are overlapped with GEMMs where they can be, which is the default
    /// (Megatron's `--tp-comm-overlap`).
    pub fn with_tp_comm_overlap(mut self, overlap: bool) -> Self {
        self.parallel.overlap = overlap;
        self
    }

    /// Whether all-to-alls of routed tokens are overlapped with the experts' GEMMs where they can be, which is not the
    /// default (Megatron's `--overlap-moe-expert-parallel-comm`). A rank's experts are split into `pieces` chunks, at
    /// most one for each expert; without a number into two where the prediction is that it saves time.
    ///
    /// # Panics
    /// For no chunks.
    pub fn with_moe_comm_overlap(mut self, overlap: bool, pieces: Option<usize>) -> Self {
        assert_ne!(pieces, Some(0), "experts are split into at least one chunk");
        (self.experts.overlap, self.experts.pieces) = (overlap, pieces);
        self
    }

    /// Whether routers choose experts at random, so that all are used alike, which is not the default (Megatron's
    /// `--moe-router-force-load-balancing`): to measure speed.
    pub fn with_forced_load_balancing(mut self, forced: bool) -> Self {
        self.experts.forced = forced;
        self
    }

    /// Output layers compute losses with about this many logits at a time, [`LOGITS_AT_ONCE`] without this.
    pub fn with_logits_at_once(mut self, logits: usize) -> Self {
        self.parallel.logits_at_once = logits;
        self
    }

    /// What [`ParamBuilder::with_recompute`] asked for; nothing without it.
    pub fn recompute(&self) -> &Recompute {
        &self.recompute
    }

    /// The tensor parallel group that layers are built for.
    pub fn parallel(&self) -> &TensorParallel {
        &self.parallel
    }

    /// The ranks that routed experts are built for.
    pub fn experts(&self) -> &ExpertParallel {
        &self.experts
    }

    /// All ranks of the pipeline stage, with their parts of layers and samples.
    pub fn stage(&self) -> &Group {
        &self.stage
    }

    /// Coordinate of this rank in the tensor parallel group.
    pub fn place(&self) -> GroupPosition {
        self.parallel.place()
    }

    /// The device parameters are created on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The element type of the parameters.
    pub fn dtype(&self) -> FloatDType {
        self.dtype
    }

    /// Everything that was created so far, in order, with the FP8 layers; the builder starts again with nothing.
    pub fn take_registry(&mut self) -> Registry {
        std::mem::take(&mut self.registry).with_fp8(std::mem::take(&mut self.fp8_layers))
    }
}
