//! A run's whole configuration, every value resolved.

use std::path::PathBuf;

use backend_dist::mesh::ParallelLayout;
use burn::tensor::FloatDType;
use clap::ValueEnum;
use models::Fp8Config;
use models::recompute::Recompute;
use serde::{Deserialize, Serialize};

use super::model::ModelSection;
use crate::data::{Blend, GptDataConfig, Split};
use crate::engine::{ContextConfig, DocumentConfig, EngineConfig, LossMean};
use crate::lr::{LrConfig, WeightDecayConfig};
use crate::optim::{LossScalerConfig, OptimizerConfig};
use crate::schedule::PipelineConfig;

/// Everything that one TOML file says about a run. [`KEYS`](super::KEYS) says what each key means.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// What is trained.
    pub model: ModelSection,
    /// How ranks are divided.
    pub parallel: ParallelLayout,
    /// How ranks that share sequences compute attention.
    #[serde(default)]
    pub context: ContextConfig,
    /// How a pipeline's stages are cut and take turns.
    pub pipeline: PipelineConfig,
    /// What is computed again.
    pub recompute: Recompute,
    /// The steps.
    pub training: TrainingSection,
    /// Linear layers in FP8.
    pub fp8: Fp8Config,
    /// The learning rate.
    pub lr: LrConfig,
    /// The optimizer.
    pub optimizer: OptimizerConfig,
    /// How the weight decay gets to the optimizer's.
    #[serde(default, rename = "weight-decay")]
    pub weight_decay: WeightDecayConfig,
    /// The factor of fp16 gradients.
    #[serde(rename = "loss-scale")]
    pub loss_scale: LossScalerConfig,
    /// What is learned.
    pub data: DataSection,
    /// What makes steps quicker at a price.
    #[serde(default)]
    pub performance: PerformanceSection,
    /// Loss on held-out data.
    pub evaluation: EvaluationSection,
    /// Saving and going on.
    pub checkpoint: CheckpointSection,
    /// What a run writes.
    pub output: OutputSection,
    /// Files that follow a run's numbers.
    pub log: LogSection,
}

/// `[training]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct TrainingSection {
    /// Optimizer steps.
    pub steps: usize,
    /// Rows that a replica takes at once.
    pub micro_batch: usize,
    /// Rows per optimizer step over all replicas.
    pub global_batch: usize,
    /// Tokens per row.
    pub seq_length: usize,
    /// Seed of initial weights and dropout.
    pub seed: u64,
    /// Precision of weights and arithmetic.
    pub dtype: Precision,
    /// What the gradient is the gradient of.
    pub loss: LossMean,
    /// Largest gradient norm.
    pub clip: Option<f64>,
}

/// What a run is computed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
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

/// `[data]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct DataSection {
    /// Prefixes of `.bin`/`.idx` pairs.
    pub prefixes: Vec<PathBuf>,
    /// A weight for each.
    pub weights: Option<Vec<f64>>,
    /// Files to tokenize at the start.
    pub text: Vec<PathBuf>,
    /// What a document is in a text file: `paragraph`, `line` or `file`.
    pub text_documents: String,
    /// A `tokenizer.json`, or `char`, `byte`, `bpe`.
    pub tokenizer: Option<String>,
    /// Entries of a tokenizer trained here.
    pub bpe_size: usize,
    /// Shares of training, validation and test.
    pub split: Split,
    /// Training rows to put in order.
    pub samples: usize,
    /// Seed of the order.
    pub seed: u32,
    /// Attention stays inside documents.
    #[serde(default)]
    pub reset_attention_mask: bool,
    /// Positions count from the start of their document.
    #[serde(default)]
    pub reset_position_ids: bool,
    /// Leave predictions at an end of document out of the loss.
    pub eod_mask_loss: bool,
    /// Id of the end-of-document token.
    pub eod_id: Option<i64>,
    /// Keep the last partial validation row.
    pub keep_partial_validation: bool,
    /// Folder that keeps sample orders.
    pub cache: Option<PathBuf>,
}

/// `[performance]`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct PerformanceSection {
    /// Time cuBLASLt's algorithms and keep the quickest.
    pub tune_products: bool,
    /// Every sum in one order, so that two runs give the same bits.
    pub deterministic: bool,
    /// On GPUs exchanges of tensor parallelism run beside the matrix products.
    pub tp_comm_overlap: bool,
    /// On GPUs of one process copy engines carry these exchanges.
    pub copy_engines: bool,
    /// On GPUs all-to-alls of routed tokens run beside the experts' products.
    pub moe_comm_overlap: bool,
    /// Into how many pieces a rank's experts are cut for that.
    pub moe_comm_pieces: Option<usize>,
    /// Tokens use experts at random, all alike: to measure speed only.
    pub moe_router_force_load_balancing: bool,
}

/// `[evaluation]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct EvaluationSection {
    /// Steps between two evaluations.
    pub every: usize,
    /// Global batches per evaluation.
    pub batches: usize,
    /// At most so many global batches at the end.
    pub final_batches: usize,
}

/// `[checkpoint]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct CheckpointSection {
    /// Where checkpoints lie; none are saved without it.
    pub directory: Option<PathBuf>,
    /// Steps between two checkpoints; the last step is saved in any case.
    pub every: Option<u64>,
    /// Newest checkpoints to keep.
    pub keep_last: Option<usize>,
    /// Also keep those whose step is a multiple of this.
    pub keep_every: Option<u64>,
    /// Write in the background.
    #[serde(rename = "async")]
    pub background: bool,
    /// `if-present`, `never` or the path of a checkpoint.
    pub resume: String,
}

/// `[output]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct OutputSection {
    /// Folder of everything that a run writes, checkpoints aside.
    pub directory: PathBuf,
}

/// `[log]`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct LogSection {
    /// A JSON object per step.
    pub jsonl: Option<PathBuf>,
    /// TensorBoard's event files.
    pub tensorboard: Option<PathBuf>,
    /// What every rank did when, in a step.
    pub trace: Option<PathBuf>,
}

impl RunConfig {
    /// What the engine must know.
    pub fn engine(&self) -> EngineConfig {
        let training = &self.training;
        EngineConfig {
            optimizer: self.optimizer,
            weight_decay: self.weight_decay,
            pipeline: self.pipeline.clone(),
            recompute: self.recompute.clone(),
            loss_scale: self.loss_scale,
            clip: training.clip,
            loss: training.loss,
            seed: training.seed,
            keep_fp8_weights: self.fp8.keep_weights,
            context: self.context.clone(),
            documents: DocumentConfig {
                reset_attention_mask: self.data.reset_attention_mask,
                reset_position_ids: self.data.reset_position_ids,
            },
            ..EngineConfig::new(training.micro_batch, training.global_batch, self.lr.clone())
        }
    }

    /// Tokens of one optimizer step.
    pub fn tokens_per_step(&self) -> usize {
        self.training.global_batch * self.training.seq_length
    }
}

impl DataSection {
    /// Keys that are set and need the id of the end-of-document token.
    pub fn needs_end_of_document(&self) -> Vec<&'static str> {
        let keys = [
            ("data.eod-mask-loss", self.eod_mask_loss),
            ("data.reset-attention-mask", self.reset_attention_mask),
            ("data.reset-position-ids", self.reset_position_ids),
        ];
        keys.into_iter().filter(|(_, set)| *set).map(|(key, _)| key).collect()
    }

    /// The prefixes with their weights.
    pub fn blend(&self) -> Blend {
        Blend { prefixes: self.prefixes.clone(), weights: self.weights.clone() }
    }

    /// How samples of `seq_length` tokens are drawn, `validation` of them for validation (`None`: what there is).
    pub fn samples(&self, seq_length: usize, validation: Option<usize>, eod_id: Option<i64>) -> GptDataConfig {
        GptDataConfig {
            seq_length,
            seed: self.seed,
            split: self.split.clone(),
            num_samples: [Some(self.samples), validation, validation],
            eod_mask_loss: eod_id.filter(|_| self.eod_mask_loss),
            eod_documents: eod_id.filter(|_| self.reset_attention_mask || self.reset_position_ids),
            keep_partial_validation: self.keep_partial_validation,
            cache: self.cache.clone(),
        }
    }
}
