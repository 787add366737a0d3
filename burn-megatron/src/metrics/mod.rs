//! Metrics of language-model training for burn-train's dashboard and for the log files of a run.
//!
//! Every rank's numbers are already reduced when they get here: a [`StepStats`] is one optimizer step of the whole
//! world, an [`EvalStats`] one validation batch of the whole world, both plain host numbers.

mod adaptors;
mod expert_map;
mod gauge;
#[cfg(feature = "cuda")]
mod gpu_watch;
mod jsonl;
mod memory;
mod mlflow;
mod protobuf;
mod rank_reading;
mod reading;
mod run_info;
mod run_log;
mod running;
mod sink;
mod stats;
mod tensorboard;
mod wandb;
mod words;

pub use expert_map::expert_map;
pub use gauge::{Gauge, mean, on_gpu, peak};
pub(crate) use jsonl::named;
pub use memory::{resident_bytes, step_memory};
pub use rank_reading::RankReading;
pub use reading::{
    CompletionLength, CompletionLengthReading, DroppedTokens, DroppedTokensReading, ExpertBalance,
    ExpertBalanceReading, FullUtilisation, FullUtilisationReading, GpuIdle, GpuIdleReading, GradNorm, GradNormReading,
    HeldOutKl, HeldOutKlReading, Kl, KlReading, LearningRate, LearningRateReading, Loss, LossReading, MeanReward,
    MeanRewardReading, Memory, MemoryReading, Perplexity, PerplexityReading, Reading, RewardAccuracy,
    RewardAccuracyReading, RewardChosen, RewardChosenReading, RewardMargin, RewardMarginReading, RewardRejected,
    RewardRejectedReading, StepMetric, Teraflops, TeraflopsReading, Throughput, ThroughputReading, TokenAccuracy,
    TokenAccuracyReading, Utilisation, UtilisationReading,
};
pub use run_info::RunInfo;
pub use run_log::{LogFiles, RunLog};
pub(crate) use sink::Sinks;
pub use sink::{LogEntry, MetricsSink};
pub use stats::{EvalStats, FlopsPerToken, LoadStats, SaveStats, StepStats, TokenLoss};
pub use words::{Words, checkpoints, gpus};
