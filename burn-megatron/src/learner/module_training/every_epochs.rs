//! Which epochs are saved, and which checkpoints stay.

use std::collections::VecDeque;

use burn::train::checkpoint::{CheckpointingAction, CheckpointingStrategy};
use burn::train::metric::store::EventStoreClient;

/// Saves after some epochs and after the last, and keeps the newest.
pub(super) struct EveryEpochs {
    /// Without it only after the last.
    pub every: Option<usize>,
    pub last: usize,
    pub keep: Option<usize>,
    pub saved: VecDeque<usize>,
}

impl CheckpointingStrategy for EveryEpochs {
    fn checkpointing(&mut self, epoch: usize, _: &EventStoreClient) -> Vec<CheckpointingAction> {
        if epoch != self.last && self.every.is_none_or(|every| !epoch.is_multiple_of(every)) {
            return Vec::new();
        }
        self.saved.push_back(epoch);
        let unwanted = self.keep.map_or(0, |keep| self.saved.len().saturating_sub(keep));
        let delete = self.saved.drain(..unwanted).map(CheckpointingAction::Delete);
        [CheckpointingAction::Save].into_iter().chain(delete).collect()
    }
}
