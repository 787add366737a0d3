//! Metrics of language-model training for burn-train's dashboard and for the log files of a run.
//!
//! Every rank's numbers are already reduced when they get here: a [`StepStats`] is one optimizer step of the whole
//! world, an [`EvalStats`] one validation batch of the whole world, both plain host numbers.

mod memory;
mod reading;
mod running;
mod saves;
mod stats;
mod steps_log;

pub use memory::resident_bytes;
pub use reading::{
    GradNorm, GradNormReading, LearningRate, LearningRateReading, Loss, LossReading, Memory, MemoryReading, Perplexity,
    PerplexityReading, Reading, StepMetric, Throughput, ThroughputReading,
};
pub use saves::Checkpoints;
pub use stats::{EvalStats, LoadStats, SaveStats, StepStats, TokenLoss};
pub use steps_log::StepsLog;
