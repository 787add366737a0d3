//! Training of this crate's own models in any layout, under burn-train's `SupervisedTraining`.
//!
//! burn-train sees a [`Megatron`] facade and plain numbers; the model lives in slices on the rank threads.

mod batches;
mod desk;
mod evaluate;
mod facade;
mod fit;
mod logs;
mod pretraining;
mod requests;
mod saving;
#[cfg(test)]
mod tests;
mod weights;
mod worker;

pub use batches::{BatchStream, GlobalBatch};
pub use evaluate::loss_over;
pub use facade::Megatron;
pub use logs::LogOptions;
pub(crate) use logs::{Tracer, Tracing};
pub use pretraining::Pretraining;
pub use saving::{CheckpointOptions, Description, Resume};
pub use weights::global_weights;
