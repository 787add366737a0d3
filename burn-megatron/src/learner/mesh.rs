//! Tensor and sequence parallelism inside, data parallelism with ZeRO outside, for any Burn module.

use backend_dist::gradients::overlapped::BUCKET;
use backend_dist::mesh::ParallelLayout;
use backend_dist::mesh_backend::LogicalOptions;
use backend_dist::parallelize::Plan;
use burn::tensor::{Device, FloatDType};

use super::zero::Units;
use crate::schedule::ScheduleKind;
use models::Recompute;

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
    pub(super) fp8: bool,
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
            fp8: false,
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

    /// Linear layers multiply in FP8, with a scale for each block, as Transformer Engine's `Float8BlockScaling`: those whose
    /// rows, inputs and outputs are multiples of 128 on every rank, and whose inputs have at most three dimensions; next to
    /// [`autocast`](Self::autocast) for a model of f32. See
    /// [`LogicalOptions::fp8`](backend_dist::mesh_backend::LogicalOptions::fp8). On an H200 it gains 2 % with a width of
    /// 1,024, 27 % with 4,096.
    pub fn fp8(mut self) -> Self {
        self.fp8 = true;
        self
    }

    /// How logical devices compute.
    pub(super) fn computes(&self) -> LogicalOptions {
        let (autocast, fp8) = (self.autocast, self.fp8);
        let fusion = (autocast.is_some() || fp8).then_some(true);
        LogicalOptions { autocast, fp8, fusion, ..LogicalOptions::default() }
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
    /// pass. In a model of [`stages`](Self::stages) it is the last micro-batch of each stage, and parameters of several parts are
    /// left for the step. Gradients come early if the forward pass takes values of parameters where it uses them, as modules of burn-nn
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
    /// ranks. A step must have one backward pass. In a model of [`stages`](Self::stages) the statistics are those of a micro-batch
    /// of all data-parallel ranks, which begin each pass of a stage together.
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
}
