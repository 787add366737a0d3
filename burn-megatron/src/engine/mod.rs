//! One rank's training step: the passes of its stages as the schedule orders them, gradient sums, clipping, the
//! optimizer.

mod anomaly;
mod answers;
mod batch;
mod chunk;
mod clock;
mod config;
mod context;
mod distill;
mod error;
mod expert_load;
mod gradient_stats;
mod groups;
mod local_batch;
mod losses;
pub(crate) mod p2p_communicator;
mod rank_engine;
mod report;
mod rollouts;
pub(crate) mod segments;
mod stage_p2p;
#[cfg(test)]
mod tests;

pub use anomaly::{Anomaly, AnomalyAction, AnomalyConfig, AnomalyState};
pub use batch::TokenBatch;
pub use config::{EngineConfig, LossMean};
pub use context::{CommWord, ContextConfig, ContextError};
pub use distill::{DistillConfig, Teacher};
pub use error::EngineError;
pub use expert_load::{ExpertLoad, ExpertSummary};
pub use gradient_stats::GradientStats;
pub use groups::ParamGroups;
pub use local_batch::DocumentConfig;
pub use rank_engine::{Position, RankEngine, Reference, packed_length};
pub use report::{EvalReport, StepReport};
pub use rollouts::Rollouts;
