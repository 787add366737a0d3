//! What the ranks of a training have together.

use std::ops::RangeInclusive;
use std::sync::Arc;

use backend_dist::comm::Group;
use burn::train::metric::store::EventStoreClient;
use burn::train::{
    EventProcessorError, EventProcessorTraining, InferenceStep, Interrupter, LearnerEvent, LearnerModel,
    SupervisedTrainingEventProcessor, TrainStep, TrainingItem,
};
use parking_lot::Mutex;

use super::gather_outputs::GatherOutputs;
use super::ids::FirstIds;
use super::items::Items;
use super::report::Told;

/// What all ranks of a training see.
pub(super) struct Shared<M: LearnerModel> {
    pub epochs: RangeInclusive<usize>,
    /// Micro-steps per optimizer step.
    pub accumulation: usize,
    pub interrupter: Interrupter,
    pub store: Arc<EventStoreClient>,
    /// Only rank 0 sends events.
    pub processor: Mutex<SupervisedTrainingEventProcessor<M>>,
    pub trained: Items<TrainingItem<<M as TrainStep>::Output>>,
    pub validated: Items<TrainingItem<<M as InferenceStep>::Output>>,
    /// Whether rank 0 has a checkpointer.
    pub checkpoints: bool,
    /// Whether rank 0 is in this process, where it takes outputs.
    pub reports: bool,
    /// Ranks of that process.
    pub reporting: usize,
    /// How outputs come from other processes, if there are any and they can.
    pub gather: Option<GatherOutputs<<M as TrainStep>::Output>>,
    /// Of random numbers on logical devices.
    pub seed: u64,
    pub ids: FirstIds,
    pub max_grad_norm: Option<f64>,
    pub told: Option<Told<M>>,
    /// Whether ranks wait for each other within operations. Nobody may read outputs meanwhile: who does waits for the
    /// rank that computed them, and the first rank for the metrics.
    pub waits_in_operations: bool,
}

impl<M: LearnerModel> Shared<M> {
    /// Sends events from rank 0; an error of a metric stops the training through the interrupter.
    pub fn send(&self, send: impl FnOnce(&mut SupervisedTrainingEventProcessor<M>) -> Result<(), EventProcessorError>) {
        let mut processor = self.processor.lock();
        self.interrupter.fail_on_error(send(&mut processor));
    }

    /// Waits until the metrics have all events.
    pub fn flush(&self) {
        flush(&mut *self.processor.lock(), |error| self.interrupter.fail(error));
    }

    /// Hands outputs of a rank to the first, of every rank as many: through this process's memory, or if they `travel` from another
    /// one.
    pub fn push(&self, items: Vec<TrainingItem<<M as TrainStep>::Output>>, travel: bool, group: &Group) {
        for item in items {
            match self.gather.as_ref().filter(|_| travel) {
                Some(gather) if !self.reports => {
                    gather.send(item.item, group);
                    continue;
                }
                Some(gather) if group.rank() == 0 => {
                    for from in self.reporting..group.size() {
                        let output = gather.receive(from, group);
                        let item = TrainingItem::new(output, item.progress.clone(), item.iteration, item.lr.clone());
                        self.trained.push(from, item);
                    }
                }
                _ => {}
            }
            if self.reports {
                self.trained.push(group.rank(), item);
            }
        }
    }

    /// All outputs are read before any rank computes further, where ranks wait for each other within operations.
    pub fn keep_together(&self, group: &Group) {
        if self.waits_in_operations {
            if group.rank() == 0 {
                self.flush();
            }
            group.barrier();
        }
    }
}

/// Waits until the metrics have all events; what failed goes to `failed`. burn-train's own wait ends never if a metric panics
/// meanwhile, because its queue, which has one place, keeps what asks for the answer: events without effect go before, and find
/// the queue closed. It takes one more than there are queues, of which [`in_one_memory`](super::one_memory::in_one_memory) adds
/// one.
pub(super) fn flush<T, V>(
    to: &mut impl EventProcessorTraining<T, LearnerEvent<V>>,
    mut failed: impl FnMut(EventProcessorError),
) {
    for _ in 0..3 {
        to.process_valid(LearnerEvent::EndEpoch(0)).unwrap_or_else(&mut failed);
    }
    to.flush().unwrap_or_else(failed);
}
