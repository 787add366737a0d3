//! Training of this crate's own models in any layout, under burn-train's `SupervisedTraining`.
//!
//! burn-train sees a [`Megatron`] placeholder and plain numbers; the model lives in slices on the rank threads.

mod batches;
mod begin_again;
mod burn_train_bridge;
mod coordinator;
mod copies;
mod epochs;
mod evaluate;
mod exit;
mod faults;
mod fit;
mod held_out;
mod local_copies;
mod logs;
mod metric_files;
mod placeholder;
mod placement;
mod pretraining;
mod references;
mod restarts;
mod roll_back;
mod rollouts;
mod same_data;
mod save_costs;
mod saving;
mod settings;
mod shared;
mod shown_metrics;
mod start;
mod stragglers;
#[cfg(test)]
mod tests;
mod weights;
mod worker;

pub use batches::{BatchStream, GlobalBatch};
pub use evaluate::loss_over;
pub use exit::ExitOptions;
pub use faults::Faults;
pub use logs::LogOptions;
pub(crate) use logs::{Tracer, Tracing};
pub use placeholder::Megatron;
pub use pretraining::Pretraining;
pub use restarts::RestartOptions;
pub use rollouts::GrpoRun;
pub use saving::{CheckpointOptions, Description, Resume};
pub use weights::global_weights;
