//! What the engine must know of a run.

use super::{AnomalyConfig, ContextConfig, DistillConfig, DocumentConfig, ParamGroups};
use crate::batch::{BatchError, BatchPlan, BatchRamp, BatchSizes};
use crate::grpo::GrpoConfig;
use crate::lr::{LrConfig, WeightDecayConfig};
use crate::optim::{LossScalerConfig, OptimizerConfig};
use crate::preference::PreferenceConfig;
use crate::schedule::{PipelineConfig, PipelineError};
use backend_dist::mesh::ParallelLayout;
use models::Recompute;
use serde::{Deserialize, Serialize};

/// What the gradient is the gradient of.
///
/// ```
/// use burn_megatron::prelude::*;
///
/// // To compare curves with a run of Megatron-LM that does not set --calculate-per-token-loss.
/// let recipe = EngineConfig { loss: LossMean::PerMicroBatch, ..EngineConfig::new(2, 16, LrConfig::constant(1e-3)) };
/// assert_ne!(recipe.loss, LossMean::default());
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LossMean {
    /// The mean over all counted tokens of the global batch: the same in every layout.
    #[default]
    PerToken,
    /// Megatron's default: the mean over micro-batches of each micro-batch's mean. With uneven masks it depends on how
    /// the batch is split (megatron/core/pipeline_parallel/schedules.py, `forward_step_calc_loss`).
    PerMicroBatch,
}

/// Batch, optimizer and schedules of a run.
///
/// ```
/// use burn_megatron::prelude::*;
///
/// let lr = LrConfig {
///     max: 3e-4,
///     min: 3e-5,
///     warmup: Span::Steps(100),
///     decay: Span::Steps(2000),
///     form: LrDecay::Cosine,
///     ..LrConfig::constant(3e-4)
/// };
/// // Micro-batches of 2 sequences, 64 sequences per optimizer step, gradients clipped at norm 1.
/// let recipe = EngineConfig { clip: Some(1.0), ..EngineConfig::new(2, 64, lr) };
/// assert_eq!(recipe.plan(4)?.accumulation, 8, "micro-batches per step on each of four data-parallel ranks");
/// assert!(recipe.plan(3).unwrap_err().to_string().contains("60 or 66"), "the nearest that three ranks can share");
/// # Ok::<(), BoxError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct EngineConfig {
    /// Sequences per forward and backward on one data-parallel rank.
    pub micro_batch: usize,
    /// Sequences per optimizer step over all ranks.
    pub global_batch: usize,
    /// How the global batch grows to its size; `None` has it from the first step.
    pub rampup_batch_size: Option<BatchRamp>,
    /// Learning rate.
    pub lr: LrConfig,
    /// What turns gradients into updates.
    #[serde(default)]
    pub optimizer: OptimizerConfig,
    /// How the weight decay gets to the one that `optimizer` names.
    #[serde(default)]
    pub weight_decay: WeightDecayConfig,
    /// Largest global gradient norm; larger ones are scaled down to it. `None` does not clip.
    pub clip: Option<f64>,
    /// What the gradient is the gradient of. The reported loss is always the mean over counted tokens.
    #[serde(default)]
    pub loss: LossMean,
    /// Order of the passes, and which layers are where.
    #[serde(default)]
    pub pipeline: PipelineConfig,
    /// What is recomputed in the backward pass.
    /// [`ParamBuilder::with_recompute`](models::ParamBuilder::with_recompute) must hear of it too.
    #[serde(default)]
    pub recompute: Recompute,
    /// How ranks that share sequences compute attention together.
    #[serde(default)]
    pub context: ContextConfig,
    /// What documents inside a sequence mean.
    #[serde(default)]
    pub documents: DocumentConfig,
    /// Of `f16` parameters.
    #[serde(default)]
    pub loss_scale: LossScalerConfig,
    /// What is done about steps with a bad loss or gradient.
    #[serde(default)]
    pub anomaly: AnomalyConfig,
    /// Parameters with a learning rate or a weight decay of their own, and frozen ones.
    #[serde(default)]
    pub groups: ParamGroups,
    /// Decay of an exponential moving average of the weights, which is sharded as the optimizer's states are.
    pub ema_decay: Option<f64>,
    /// Losses on held-out data are those of the average.
    #[serde(default)]
    pub evaluate_ema: bool,
    /// Steps say what the norms of the gradients of embedding, layers and head are.
    #[serde(default)]
    pub layer_norms: bool,
    /// Steps say how many gradients are zero.
    #[serde(default)]
    pub num_zeros_in_grad: bool,
    /// Steps say what the greatest attention logit is.
    #[serde(default)]
    pub max_attention_logit: bool,
    /// FP8 layers keep their quantised weights from update to update; never under ZeRO 3.
    #[serde(default = "yes")]
    pub keep_fp8_weights: bool,
    /// Preference tuning: sequences have documents that are answers, and the loss is one of pairs of them. The mean is
    /// over the pairs of the global batch, whatever `loss` says.
    pub preference: Option<PreferenceConfig>,
    /// GRPO: sequences are prompts with completions, which [`RankEngine::train_rollouts`](super::RankEngine::train_rollouts)
    /// gets; the mean is over what the configuration says, whatever `loss` says.
    pub grpo: Option<GrpoConfig>,
    /// Distillation from the model that [`RankEngine::with_teacher`](super::RankEngine::with_teacher) gets.
    pub distill: Option<DistillConfig>,
    /// Whether evaluation says how many labels are the likeliest tokens, which takes the logits of the whole vocabulary on
    /// every rank.
    #[serde(default)]
    pub accuracy: bool,
    /// GPUs: every sum has one order, so that a resumed run is bitwise identical to one that never stopped. The backward
    /// pass of attention with a head_dim of 128 is then slower by about 10 %.
    #[serde(default)]
    pub deterministic: bool,
    /// GPUs: DMA copy engines transfer activations and tokens between the GPUs of a process with peer access, so that
    /// overlapped GEMMs keep all SMs. Otherwise NCCL's kernels do.
    #[serde(default = "yes")]
    pub copy_engines: bool,
    /// Routers count how the experts are used, for reports; training is the same without.
    #[serde(default = "yes")]
    pub router_statistics: bool,
    /// Seed of dropout. Masks depend on it, the step and the position in the global batch, not on the layout.
    #[serde(default)]
    pub seed: u64,
}

fn yes() -> bool {
    true
}

impl EngineConfig {
    /// AdamW without clipping, the mean over tokens, no recomputation, the schedule that follows from the sizes.
    pub fn new(micro_batch: usize, global_batch: usize, lr: LrConfig) -> Self {
        Self {
            micro_batch,
            global_batch,
            rampup_batch_size: None,
            lr,
            optimizer: OptimizerConfig::default(),
            weight_decay: WeightDecayConfig::default(),
            clip: None,
            loss: LossMean::default(),
            pipeline: PipelineConfig::default(),
            recompute: Recompute::default(),
            context: ContextConfig::default(),
            documents: DocumentConfig::default(),
            keep_fp8_weights: true,
            loss_scale: LossScalerConfig::default(),
            anomaly: AnomalyConfig::default(),
            groups: ParamGroups::default(),
            ema_decay: None,
            evaluate_ema: false,
            layer_norms: false,
            num_zeros_in_grad: false,
            max_attention_logit: false,
            preference: None,
            grpo: None,
            distill: None,
            accuracy: false,
            deterministic: false,
            copy_engines: true,
            router_statistics: true,
            seed: 0,
        }
    }

    /// Sequences of every global batch.
    pub fn batch_sizes(&self) -> BatchSizes {
        BatchSizes { global: self.global_batch, ramp: self.rampup_batch_size }
    }

    /// How the global batch of the step that follows `consumed` samples is split over `data_parallel` ranks.
    ///
    /// # Errors
    /// Where the sizes of any step do not divide.
    pub fn plan_at(&self, consumed: u64, data_parallel: usize) -> Result<BatchPlan, BatchError> {
        BatchPlan::at(&self.batch_sizes(), consumed, self.micro_batch, data_parallel)
    }

    /// Whether the pipeline takes the micro-batches of every step, also while the batch grows.
    ///
    /// # Errors
    /// What the schedule says of a number of micro-batches.
    pub fn check_ramp(&self, layout: &ParallelLayout, layers: usize) -> Result<(), PipelineError> {
        let unit = self.micro_batch * layout.dp;
        let mut counts = self.batch_sizes().all().map(|size| size / unit.max(1));
        counts.try_for_each(|count| self.pipeline.resolve(layout, layers, count).map(drop))
    }

    /// How the global batch is split over `data_parallel` ranks, after its ramp.
    ///
    /// # Errors
    /// Where the sizes do not divide.
    pub fn plan(&self, data_parallel: usize) -> Result<BatchPlan, BatchError> {
        BatchPlan::from_global(self.global_batch, self.micro_batch, data_parallel)
    }
}
