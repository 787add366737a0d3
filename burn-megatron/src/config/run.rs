//! A run's whole configuration, every value resolved.

use std::path::PathBuf;

use backend_dist::mesh::ParallelLayout;
use burn::tensor::FloatDType;
use models::Fp8Config;
use models::recompute::Recompute;
use serde::{Deserialize, Serialize};

use super::data::DataSection;
use super::model::ModelSection;
use super::post_training::{ChatSection, DistillSection, GrpoSection, LoraSection, PreferenceSection};
use crate::batch::BatchRamp;
use crate::checkpoint::SaveEvery;
use crate::engine::{AnomalyConfig, ContextConfig, LossMean, ParamGroups};
use crate::lr::{LrConfig, WeightDecayConfig};
use crate::optim::{LossScalerConfig, OptimizerConfig};
use crate::schedule::PipelineConfig;

/// Everything that one TOML file says about a run. [`KEYS`](super::KEYS) describes each key.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// The model.
    pub model: ModelSection,
    /// The parallel layout.
    pub parallel: ParallelLayout,
    /// Context parallelism.
    #[serde(default)]
    pub context: ContextConfig,
    /// Pipeline schedule and stages.
    pub pipeline: PipelineConfig,
    /// Activation recomputation.
    pub recompute: Recompute,
    /// Length, batch, precision and loss.
    pub training: TrainingSection,
    /// FP8 linear layers.
    pub fp8: Fp8Config,
    /// Learning-rate schedule.
    pub lr: LrConfig,
    /// The optimizer.
    pub optimizer: OptimizerConfig,
    /// Parameters with factors of their own, and frozen ones.
    #[serde(default, rename = "param-groups")]
    pub param_groups: ParamGroups,
    /// Weight-decay schedule.
    #[serde(default, rename = "weight-decay")]
    pub weight_decay: WeightDecayConfig,
    /// Loss scaling of fp16.
    #[serde(rename = "loss-scale")]
    pub loss_scale: LossScalerConfig,
    /// Steps with a bad loss or gradient.
    #[serde(default)]
    pub anomaly: AnomalyConfig,
    /// Training data.
    pub data: DataSection,
    /// Conversations as training data.
    #[serde(default)]
    pub chat: ChatSection,
    /// Pairs of answers as training data.
    #[serde(default)]
    pub preference: PreferenceSection,
    /// Prompts to complete, and rewards.
    #[serde(default)]
    pub grpo: GrpoSection,
    /// A model to learn from.
    #[serde(default)]
    pub distill: DistillSection,
    /// Adapters in place of the weights.
    #[serde(default)]
    pub lora: LoraSection,
    /// Speed and determinism on GPUs.
    #[serde(default)]
    pub performance: PerformanceSection,
    /// Loss on held-out data.
    pub evaluation: EvaluationSection,
    /// Saving and resuming.
    pub checkpoint: CheckpointSection,
    /// Output folder.
    pub output: OutputSection,
    /// Additional log files.
    pub log: LogSection,
}

/// `[training]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct TrainingSection {
    /// Optimizer steps.
    pub steps: usize,
    /// Sequences per micro-batch and data-parallel rank.
    pub micro_batch: usize,
    /// Sequences per optimizer step over all data-parallel ranks.
    pub global_batch: usize,
    /// How the global batch grows to its size.
    pub rampup_batch_size: Option<BatchRamp>,
    /// Sequence length.
    pub seq_length: usize,
    /// Seed of initial weights and dropout.
    pub seed: u64,
    /// Precision of weights and activations.
    pub dtype: Precision,
    /// Loss reduction.
    pub loss: LossMean,
    /// Maximum gradient norm.
    pub clip: Option<f64>,
    /// Decay of a moving average of the weights.
    pub ema_decay: Option<f64>,
    /// Minutes after which the run ends.
    pub exit_duration_in_mins: Option<f64>,
    /// The run ends after a step that is a multiple of this.
    pub exit_interval: Option<u64>,
    /// How often the ranks of a process may begin again.
    #[serde(default)]
    pub max_restarts: usize,
    /// The smallest data-parallel size with which the run continues after devices are lost.
    pub min_data_parallel: Option<usize>,
    /// Minutes that a rank waits for others.
    #[serde(default = "ten")]
    pub distributed_timeout_minutes: f64,
}

/// The timeout of checkpoints' runs that had none in their configuration.
fn ten() -> f64 {
    10.0
}

/// Precision of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Single precision
    F32,
    /// Double precision
    F64,
    /// Weights and activations in bf16, optimizer and gradients in fp32
    Bf16,
    /// The same in fp16
    F16,
}

impl Precision {
    /// Bytes of a weight.
    pub fn bytes(self) -> u64 {
        match self {
            Precision::F64 => 8,
            Precision::F32 => 4,
            Precision::Bf16 | Precision::F16 => 2,
        }
    }
}

impl From<Precision> for FloatDType {
    fn from(precision: Precision) -> Self {
        match precision {
            Precision::F32 => FloatDType::F32,
            Precision::F64 => FloatDType::F64,
            Precision::Bf16 => FloatDType::BF16,
            Precision::F16 => FloatDType::F16,
        }
    }
}

/// `[performance]`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct PerformanceSection {
    /// Fixed order of every sum, so that two runs are bitwise identical.
    pub deterministic: bool,
    /// Overlap tensor-parallel communication with GEMMs.
    pub tp_comm_overlap: bool,
    /// Transfer with DMA copy engines between the GPUs of one process.
    pub copy_engines: bool,
    /// Overlap the all-to-alls of MoE tokens with the experts' GEMMs.
    pub moe_comm_overlap: bool,
    /// Number of chunks of the local experts for this overlap.
    pub moe_comm_chunks: Option<usize>,
    /// Route tokens to random experts, to measure speed only.
    pub moe_router_force_load_balancing: bool,
    /// About how many logits a rank holds at a time; none: [`LOGITS_AT_ONCE`](backend_dist::ops::LOGITS_AT_ONCE).
    pub logits_at_once: Option<usize>,
}

/// `[evaluation]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct EvaluationSection {
    /// Steps between two evaluations.
    pub every: usize,
    /// Global batches per evaluation.
    pub batches: usize,
    /// Maximum global batches of the final evaluation.
    pub final_batches: usize,
    /// The average of the weights is evaluated.
    #[serde(default)]
    pub ema: bool,
    /// Files of tasks of log-likelihoods.
    #[serde(default)]
    pub tasks: Vec<PathBuf>,
}

/// `[checkpoint]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct CheckpointSection {
    /// Folder of checkpoints; without it none are saved.
    pub directory: Option<PathBuf>,
    /// URL or folder that checkpoints are also copied to.
    pub storage: Option<String>,
    /// How often checkpoints are saved; the last step is saved in any case.
    pub every: SaveEvery,
    /// Steps between copies in host memory.
    pub non_persistent_every: Option<u64>,
    /// Folder of those copies in a file system of the host's memory.
    #[serde(default)]
    pub non_persistent_local_dir: Option<PathBuf>,
    /// Newest checkpoints to keep.
    pub keep_last: Option<usize>,
    /// Also keep those whose step is a multiple of this.
    pub keep_every: Option<u64>,
    /// Write in the background.
    #[serde(rename = "async")]
    pub background: bool,
    /// Copy to page-locked host memory while training continues.
    #[serde(default)]
    pub pinned_memory: bool,
    /// `if-present`, `never` or the path of a checkpoint.
    pub resume: String,
}

/// `[output]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct OutputSection {
    /// Folder of everything that a run writes, except checkpoints.
    pub directory: PathBuf,
}

/// `[log]`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct LogSection {
    /// A JSON object per step.
    pub jsonl: Option<PathBuf>,
    /// TensorBoard's event files.
    pub tensorboard: Option<PathBuf>,
    /// Weights & Biases' offline runs.
    pub wandb: Option<PathBuf>,
    /// MLflow's file store.
    pub mlflow: Option<PathBuf>,
    /// Ranks that others wait for are named.
    pub straggler: bool,
    /// Norms of the gradients of layers.
    pub layer_norms: bool,
    /// Number of gradients that are zero.
    pub num_zeros_in_grad: bool,
    /// The greatest attention logit.
    pub max_attention_logit: bool,
    /// Timeline of a few steps on every rank.
    pub trace: Option<PathBuf>,
}
