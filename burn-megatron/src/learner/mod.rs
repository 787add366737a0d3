//! Training strategies for burn-train's `SupervisedTraining`.
//!
//! [`MegatronStrategy::data_parallel`] trains any Burn module on several ranks; nothing else of a program changes:
//!
//! ```no_run
//! # use burn::train::{LearnerModel, SupervisedTraining};
//! # use burn_megatron::learner::MegatronStrategy;
//! # fn strategy<M: LearnerModel>(training: SupervisedTraining<M>) -> SupervisedTraining<M> {
//! training.with_training_strategy(MegatronStrategy::data_parallel(4))
//! # }
//! ```
//!
//! [`Pretraining`] trains this crate's own models in any layout of ranks.

mod average;
mod data_parallel;
mod items;
mod model_parallel;
mod outcome;
mod rank_loop;
mod shares;
mod stop;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use burn::tensor::Device;
use burn::train::{LearnerModel, TrainingStrategy};

use data_parallel::DataParallel;
pub use model_parallel::{
    BatchStream, CheckpointOptions, Description, GlobalBatch, LogOptions, Megatron, Pretraining, Resume,
    global_weights, loss_over,
};
use outcome::Reported;

/// Ways to spread a training over ranks, as strategies for `SupervisedTraining::with_training_strategy`.
pub struct MegatronStrategy;

impl MegatronStrategy {
    /// Data parallelism for any Burn module: `ranks` threads share the device of the learner's model.
    ///
    /// Every rank trains on its own share of the data with the batch size of the loader, so one step of `ranks` ranks
    /// equals one step of one device with a batch `ranks` times as large. See [`data_parallel_on`] for the details.
    ///
    /// # Panics
    /// If `ranks` is 0.
    ///
    /// [`data_parallel_on`]: MegatronStrategy::data_parallel_on
    pub fn data_parallel<M: LearnerModel>(ranks: usize) -> TrainingStrategy<M> {
        assert!(ranks > 0, "data parallelism needs at least 1 rank, not 0");
        custom(DataParallel { ranks, devices: Vec::new() })
    }

    /// Data parallelism for any Burn module with one rank on each of `devices`.
    ///
    /// - The training set is cut into equal contiguous shares; the last `items % ranks` items are left out, so that
    ///   every rank takes the same number of equal steps. The validation set is shared out whole.
    /// - Gradients are averaged over the ranks in the order in which the module visits its parameters, then every
    ///   rank takes the same optimizer step. A parameter that no rank used in a step is not touched.
    /// - Gradient accumulation sums micro-steps on each rank and averages once, before the optimizer step.
    /// - Checkpoints, metrics, early stopping and the interrupter work as on one device; all ranks take every
    ///   decision to stop together.
    /// - If a rank fails, all stop, the terminal is restored, the failure is printed to stderr and is the `error` of
    ///   the `LearningResult`, whose model is then the one that the training began with.
    ///
    /// # Panics
    /// If `devices` is empty.
    pub fn data_parallel_on<M: LearnerModel>(devices: Vec<Device>) -> TrainingStrategy<M> {
        assert!(!devices.is_empty(), "data parallelism needs at least 1 device");
        custom(DataParallel { ranks: devices.len(), devices })
    }
}

/// burn-train wants an `Arc`, but neither shares nor sends it.
#[allow(clippy::arc_with_non_send_sync)]
fn custom<M: LearnerModel, S: outcome::Fit<M> + 'static>(strategy: S) -> TrainingStrategy<M> {
    TrainingStrategy::Custom(Arc::new(Reported::new(strategy)))
}
