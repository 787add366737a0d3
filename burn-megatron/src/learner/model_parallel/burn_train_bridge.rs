//! burn-train's checkpointing options, which drive ours.
//!
//! burn-train decides at the end of an epoch whether to save, and then asks its learner for three records: model,
//! optimizer, learning rate. That learner holds a [`Megatron`] placeholder, so its records mean nothing. **That a record
//! is asked for means "save now"**: [`SaveRequest`] stands for the learning-rate schedule, and its `to_record` notes the
//! request, which the ranks then fulfil with a checkpoint of their own. The learning rate carries it because it is the
//! one record that burn-train takes on the calling thread.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use burn::lr_scheduler::{LrScheduler, LrSchedulerRecord};
use burn::module::Module;
use burn::optim::{LearningRate, OptimizerRecord, SgdConfig};
use burn::store::ModuleRecord;
use burn::train::checkpoint::{Checkpointer, CheckpointerError, CheckpointingAction, CheckpointingStrategy};
use burn::train::metric::store::EventStoreClient;
use parking_lot::Mutex;

use super::placeholder::Megatron;
use super::saving::Saves;
use crate::checkpoint::Checkpoint;

/// Stands for the learning-rate schedule, and notes that burn-train wants a save.
#[derive(Clone, Default)]
pub(super) struct SaveRequest(Arc<AtomicBool>);

impl SaveRequest {
    /// Whether a save was asked for since the last call.
    pub fn take(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}

impl LrScheduler for SaveRequest {
    fn step(&mut self) -> LearningRate {
        0.0
    }

    fn to_record(&self) -> LrSchedulerRecord {
        self.0.store(true, Ordering::Relaxed);
        0.0f64.to_record()
    }

    fn load_record(&mut self, _: LrSchedulerRecord) {}
}

/// What burn-train saves and restores records with: nothing is written, and what is restored is the placeholder.
#[derive(Clone)]
pub(super) struct Records {
    root: PathBuf,
    /// Steps of an epoch.
    epoch: usize,
    /// The run in progress.
    saves: Arc<Mutex<Weak<Saves>>>,
}

impl Records {
    /// For a run that keeps its checkpoints in `root` and has epochs of so many steps.
    pub fn of(root: PathBuf, epoch: usize) -> Self {
        Self { root, epoch, saves: Arc::default() }
    }

    /// What is to be deleted from now on is handed to the run that saves, which never deletes its latest checkpoint.
    pub fn attach(&self, saves: &Arc<Saves>) {
        *self.saves.lock() = Arc::downgrade(saves);
    }

    fn delete(&self, epoch: usize) -> Result<(), CheckpointerError> {
        let (step, saves) = ((epoch * self.epoch) as u64, self.saves.lock().upgrade());
        let delete = match saves {
            Some(saves) => saves.retire(step),
            // The run has ended before burn-train asked.
            None => Checkpoint::delete(&self.root, step),
        };
        delete.map_err(|error| CheckpointerError::Unknown(error.to_string()))
    }
}

macro_rules! checkpointer {
    ($record:ty, $delete:expr, $restore:expr) => {
        impl Checkpointer<$record> for Records {
            fn save(&self, _: usize, _: $record) -> Result<(), CheckpointerError> {
                Ok(())
            }

            fn delete(&self, epoch: usize) -> Result<(), CheckpointerError> {
                let delete: fn(&Records, usize) -> Result<(), CheckpointerError> = $delete;
                delete(self, epoch)
            }

            fn restore(&self, _: usize) -> Result<$record, CheckpointerError> {
                Ok($restore)
            }
        }
    };
}

checkpointer!(ModuleRecord, Records::delete, Megatron::new().into_record());
checkpointer!(OptimizerRecord, |_, _| Ok(()), SgdConfig::new().init().to_record());
checkpointer!(LrSchedulerRecord, |_, _| Ok(()), 0.0f64.to_record());

/// The strategy of a run that saves by steps: nothing at the end of an epoch.
pub(super) struct BySteps;

impl CheckpointingStrategy for BySteps {
    fn checkpointing(&mut self, _: usize, _: &EventStoreClient) -> Vec<CheckpointingAction> {
        Vec::new()
    }
}
