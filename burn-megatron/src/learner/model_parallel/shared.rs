//! What the ranks of a run share from its start, or its restart, on.

use std::sync::Arc;

use parking_lot::Mutex;

use super::logs::Tracing;
use super::saving::{Newest, Saves};
use super::worker::StopChannel;
use crate::checkpoint::Checkpoint;

/// What the ranks of a run share.
pub(super) struct Start {
    pub saves: Option<Arc<Saves>>,
    /// Copies that outlive the processes.
    pub local: Option<Arc<Saves>>,
    /// Where they begin, until all have; at the first step without it.
    pub from: Mutex<Option<Arc<Checkpoint>>>,
    /// What the run has on disk then: after a restart from memory an older one.
    pub newest: Option<Newest>,
    /// How often they have begun before.
    pub restarts: usize,
    /// The same after a restart.
    pub tracing: Option<Tracing>,
    /// Where there are several processes.
    pub stop_channel: Option<StopChannel>,
    /// Ranks of this process.
    pub ranks: usize,
}

impl Start {
    pub fn end_copies(&self) {
        self.saves.iter().for_each(|saves| saves.end_copies());
    }
}
