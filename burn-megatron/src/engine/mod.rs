//! One rank's training step: micro-batches, gradient sums, clipping, the optimizer.

mod batch;
mod config;
mod error;
mod layout;
mod rank_engine;
mod report;
#[cfg(test)]
mod tests;

pub use batch::TokenBatch;
pub use config::{EngineConfig, LossMean};
pub use error::EngineError;
pub use layout::{NotRunnable, runnable};
pub use rank_engine::{Position, RankEngine};
pub use report::{EvalReport, StepReport};
