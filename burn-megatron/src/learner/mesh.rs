//! Tensor and sequence parallelism inside, data parallelism with ZeRO outside, for any Burn module.

use backend_dist::gradients::overlapped::BUCKET;
use backend_dist::mesh::{Axis, ParallelLayout};
use backend_dist::parallelize::Plan;
use burn::module::ModuleDisplay;
use burn::tensor::{Device, FloatDType};
use burn::train::{LearnerModel, TrainStep, TrainingStrategy};

use super::data_parallel::{DataParallel, drawn};
use super::report::{Fit, Fitted, Told, Training};
use super::tensor_parallel::TensorParallel;
use super::zero::{Units, running_states};
use super::{custom, processes};
use crate::schedule::ScheduleKind;
use models::Recompute;
use models::recompute::Granularity;

/// A layout of ranks for any Burn module, as a strategy for `SupervisedTraining::with_training_strategy`:
/// [`MegatronStrategy::mesh`](super::MegatronStrategy::mesh) makes it.
///
/// ```no_run
/// use burn::module::ModuleDisplay;
/// use burn::train::{LearnerModel, SupervisedTraining};
/// use burn_megatron::prelude::*;
///
/// /// Attention and feed-forward layers of burn-nn are sharded by type, a layer of one's own by path.
/// fn spread<M: LearnerModel + ModuleDisplay>(training: SupervisedTraining<M>) -> Result<SupervisedTraining<M>, BoxError> {
///     let strategy = MegatronStrategy::mesh("TP2 SP DP2 ZeRO1".parse()?).plan(Plan::auto().columns("head")).micro_batches(4);
///     Ok(training.with_training_strategy(strategy.into()))
/// }
/// ```
#[derive(Clone)]
pub struct MeshStrategy {
    pub(super) layout: ParallelLayout,
    pub(super) plan: Plan,
    pub(super) devices: Vec<Device>,
    pub(super) micro_batches: Option<usize>,
    pub(super) units: Units,
    pub(super) keeps_gathered: bool,
    pub(super) autocast: Option<FloatDType>,
    pub(super) max_grad_norm: Option<f64>,
    pub(super) sync_batch_norm: bool,
    pub(super) seeded: bool,
    pub(super) overlap: bool,
    pub(super) bucket: usize,
    pub(super) schedule: Option<ScheduleKind>,
    pub(super) recompute: Recompute,
}

impl MeshStrategy {
    pub(super) fn new(layout: ParallelLayout) -> Self {
        Self {
            layout,
            plan: Plan::auto(),
            devices: Vec::new(),
            micro_batches: None,
            units: Units::auto(),
            keeps_gathered: false,
            autocast: None,
            max_grad_norm: None,
            sync_batch_norm: false,
            seeded: false,
            overlap: false,
            bucket: BUCKET,
            schedule: None,
            recompute: Recompute::default(),
        }
    }

    /// Which parameters are sharded over the tensor-parallel ranks, and how; [`Plan::auto`] unless it is called.
    pub fn plan(mut self, plan: Plan) -> Self {
        self.plan = plan;
        self
    }

    /// A device for each rank of this process, tensor-parallel ranks next to each other. Without it GPUs from 0 on, if the learner's
    /// model is on a GPU, else threads that share the model's device.
    pub fn devices(mut self, devices: Vec<Device>) -> Self {
        self.devices = devices;
        self
    }

    /// Batches of the loader that each data-parallel rank takes for one optimizer step (gradient accumulation). Replaces
    /// `SupervisedTraining::grads_accumulation`.
    pub fn micro_batches(mut self, batches: usize) -> Self {
        self.micro_batches = Some(batches);
        self
    }

    /// What ZeRO 3 gathers together, and what stays whole.
    pub fn units(mut self, units: Units) -> Self {
        self.units = units;
        self
    }

    /// Whether ZeRO 3 frees gathered parameters after the forward pass and gathers them again for the backward pass, as
    /// `reshard_after_forward` of PyTorch's FSDP2; it does unless this is `false`. Then the backward pass does not wait for
    /// parameters, and does not repeat cheap operations of the forward pass, as it must to keep none: it is faster, and each
    /// rank has room for all parameters once more, under [`autocast`](Self::autocast) in half precision.
    pub fn reshard_after_forward(mut self, reshard: bool) -> Self {
        self.keeps_gathered = !reshard;
        self
    }

    /// Mixed precision for a model of f32 parameters, as under PyTorch's `torch.autocast`: GEMMs and what is computed
    /// from their outputs in bf16 or f16; parameters, gradients and optimizer states in f32. See
    /// [`LogicalOptions::autocast`](backend_dist::mesh_backend::LogicalOptions::autocast).
    pub fn autocast(mut self, half: FloatDType) -> Self {
        self.autocast = Some(half);
        self
    }

    /// Clips gradients by the norm of all of them together, each parameter counted once, as PyTorch's `clip_grad_norm_`:
    /// after accumulation and the mean over data-parallel ranks, by `norm / (total + 1e-6)` if that is below 1.
    /// `GradientClippingConfig::Norm` of Burn's optimizers clips each parameter by its own norm; that works in every layout
    /// too.
    pub fn max_grad_norm(mut self, norm: f64) -> Self {
        self.max_grad_norm = Some(norm);
        self
    }

    /// Reduces gradients over data-parallel ranks in buckets, each as soon as the backward pass has its gradients, as
    /// Megatron-LM's `--overlap-grad-reduce` and PyTorch's `DistributedDataParallel`: with ZeRO 0 and 1 in the last
    /// micro-batch of a step, with ZeRO 2 in every one. It gains nothing on CPU ranks. A step must have one backward
    /// pass. Gradients come early if the forward pass takes values of parameters where it uses them, as modules of burn-nn
    /// do.
    pub fn overlap_grad_reduce(mut self) -> Self {
        self.overlap = true;
        self
    }

    /// Bytes of a bucket of [`overlap_grad_reduce`](Self::overlap_grad_reduce), as `bucket_cap_mb` of PyTorch's
    /// `DistributedDataParallel`; 25 MiB unless it is called.
    pub fn bucket_size(mut self, bytes: usize) -> Self {
        self.bucket = bytes;
        self
    }

    /// Normalizes batches of `nn::BatchNorm` by the statistics of all data-parallel ranks in training, as PyTorch's
    /// `SyncBatchNorm`: ranks compute what one device does with all their samples. Running statistics are equal on all
    /// ranks. A step must have one backward pass.
    pub fn sync_batch_norm(mut self) -> Self {
        self.sync_batch_norm = true;
        self
    }

    /// Random numbers, as of dropout, follow from epoch and data-parallel rank also without tensor parallelism, where they are
    /// those of the process else: a training that resumes has the same ones. An operation takes about 2 µs more of the host.
    pub fn seeded(mut self) -> Self {
        self.seeded = true;
        self
    }

    /// The order of the passes in a pipeline. Without it 1F1B, with VPP interleaved 1F1B; GPipe is the other. For models of
    /// [`stages`](Self::stages).
    pub fn schedule(mut self, schedule: ScheduleKind) -> Self {
        self.schedule = Some(schedule);
        self
    }

    /// Activation recomputation: blocks keep only their inputs, and run their forward pass again in the backward pass, with
    /// the same random numbers. [`Recompute::full`] is all blocks. For models of [`stages`](Self::stages).
    pub fn recompute(mut self, recompute: Recompute) -> Self {
        self.recompute = recompute;
        self
    }

    /// Why no training can start with these settings, whatever the model.
    pub(super) fn check(&self) -> Result<(), String> {
        let Self { layout, devices, micro_batches, plan, autocast, .. } = self;
        if let Some(half) = autocast.filter(|half| !matches!(half, FloatDType::BF16 | FloatDType::F16)) {
            return Err(format!("autocast({half:?}): no half precision type; nearest legal: BF16, F16"));
        }
        if let Some(norm) = self.max_grad_norm.filter(|norm| !norm.is_finite() || *norm <= 0.0) {
            return Err(format!("max_grad_norm {norm} is not above 0; nearest legal: none, or a norm such as 1.0"));
        }
        if plan.axis() != Axis::Tp {
            return Err(format!("the plan shards along axis {}; nearest legal: tp, without .along(..)", plan.axis()));
        }
        let (ranks, given, processes) = (layout.world_size(), devices.len(), processes::count());
        let here = ranks / processes;
        if given > 0 && given != here && ranks.is_multiple_of(processes) {
            let each = if processes > 1 { format!(", {here} in each of {processes} processes") } else { String::new() };
            return Err(format!(
                "layout {layout} has {ranks} ranks{each}, and there are {given} devices; nearest legal: {here}"
            ));
        }
        if self.overlap && (layout.dp < 2 || layout.zero > 2) {
            let why = match layout.zero {
                0..=2 => "no other rank has gradients of the same parameters",
                _ => "ZeRO 3 reduces gradients during the backward pass by itself",
            };
            return Err(format!("overlap_grad_reduce with layout {layout}: {why}; nearest legal: without it"));
        }
        if self.keeps_gathered && layout.zero < 3 {
            return Err(format!(
                "reshard_after_forward(false) with layout {layout}: only ZeRO 3 gathers parameters; nearest legal: without it"
            ));
        }
        if *micro_batches == Some(0) {
            return Err("micro_batches 0: a step takes at least 1 batch; nearest legal: 1".into());
        }
        Ok(())
    }

    /// Refuses what only a model of stages has.
    fn check_without_stages(&self) -> Result<(), String> {
        let end = "blocks are those of a model that implements `Stages`: end the strategy with .stages()";
        if let Some(schedule) = self.schedule {
            return Err(format!("schedule {schedule}: {end}; nearest legal without: none"));
        }
        if self.recompute.granularity != Granularity::None {
            return Err(format!("recompute: {end}; nearest legal without: Recompute::default()"));
        }
        Ok(())
    }
}

impl<M: LearnerModel + ModuleDisplay> From<MeshStrategy> for TrainingStrategy<M> {
    fn from(strategy: MeshStrategy) -> Self {
        strategy.telling(None)
    }
}

impl MeshStrategy {
    /// As a strategy whose ranks tell each other something of their outputs.
    pub(super) fn telling<M: LearnerModel + ModuleDisplay>(self, told: Option<Told<M>>) -> TrainingStrategy<M> {
        let is_logical = self.autocast.is_some() || self.sync_batch_norm || self.seeded;
        let tensor = TensorParallel::new(&self.layout, &self.plan, is_logical);
        custom(OnMesh { tensor, strategy: self, told })
    }
}

/// Refuses what is not for any module.
pub(crate) fn for_any_module(layout: &ParallelLayout) -> Result<(), String> {
    let dp = layout.dp.max(1);
    let zero = if dp > 1 { layout.zero.min(3) } else { 0 };
    let tp = layout.tp.max(1);
    let nearest = ParallelLayout { tp, sp: layout.sp && tp > 1, dp, zero, ..ParallelLayout::default() };
    if *layout == nearest {
        return Ok(());
    }
    Err(format!(
        "layout {layout}: any module can have tensor, sequence and data parallelism with ZeRO 0 to 3 over all data-parallel ranks, \
         and one that implements `Stages` pipelines; nearest legal: {nearest}"
    ))
}

/// Refuses what is not for a model of stages.
pub(crate) fn for_stages(layout: &ParallelLayout) -> Result<(), String> {
    let zero = if layout.dp > 1 { layout.zero.min(3) } else { 0 };
    let ParallelLayout { tp, sp, pp, vpp, dp, .. } = *layout;
    let nearest = ParallelLayout { tp, sp: sp && tp > 1, pp, vpp, dp, zero, ..ParallelLayout::default() };
    if *layout == nearest {
        return Ok(());
    }
    Err(format!(
        "layout {layout}: a model of stages can have pipeline, tensor, sequence and data parallelism with ZeRO 0 to 3 over all \
         data-parallel ranks; nearest legal: {nearest}"
    ))
}

struct OnMesh<M: TrainStep> {
    strategy: MeshStrategy,
    tensor: Option<TensorParallel<M>>,
    told: Option<Told<M>>,
}

impl<M: LearnerModel> OnMesh<M> {
    /// Why the training cannot start.
    fn check(&self, model: &M) -> Result<(), String> {
        for_any_module(&self.strategy.layout)?;
        self.strategy.check()?;
        self.strategy.check_without_stages()?;
        if self.strategy.sync_batch_norm && running_states(model).is_empty() {
            return Err(
                "sync_batch_norm: the model has no running statistics, so no `nn::BatchNorm`; nearest legal: none"
                    .into(),
            );
        }
        self.tensor.as_ref().map_or(Ok(()), |tensor| tensor.check(model)).map_err(|error| error.to_string())
    }
}

impl<M: LearnerModel> Fit<M> for OnMesh<M> {
    fn fit(&self, mut training: Training<M>) -> Fitted<M> {
        let seed = self.tensor.as_ref().map_or(0, |_| drawn(&self.strategy.devices, &training.learner.model()));
        if let Err(message) = self.check(&training.learner.model()) {
            return training.fail(message);
        }
        let strategy = self.strategy.clone();
        let MeshStrategy { layout, devices, micro_batches, units, autocast, max_grad_norm, .. } = strategy;
        training.components.grad_accumulation = micro_batches.or(training.components.grad_accumulation);
        training.told = self.told;
        let inner = DataParallel {
            devices,
            tensor: self.tensor.clone(),
            seed,
            autocast,
            sync_batch_norm: self.strategy.sync_batch_norm,
            overlap: self.strategy.overlap.then_some(self.strategy.bucket),
            max_grad_norm,
            keeps_gathered: self.strategy.keeps_gathered,
            ..DataParallel::new(layout.dp, layout.zero, units)
        };
        inner.fit(training)
    }
}
