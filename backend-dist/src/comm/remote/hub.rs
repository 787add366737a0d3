//! Process 0's table of the meetings that span processes.

use super::frame::{Blob, MeetingKey, Part};
use crate::comm::failure::FailureCause;
use std::collections::{BTreeSet, HashMap};

/// Meetings that some process has come to, but not all.
#[derive(Default)]
pub(crate) struct Hub {
    meetings: HashMap<MeetingKey, Pending>,
    finished: BTreeSet<usize>,
}

struct Pending {
    /// Processes that have members.
    processes: Vec<usize>,
    arrived: BTreeSet<usize>,
    brought: Vec<Brought>,
}

struct Brought {
    process: usize,
    part: Part,
    blob: Blob,
}

/// What comes of a process's arrival at a meeting.
pub(crate) enum Arrival {
    /// Others have yet to come.
    Waits,
    /// All have come: for each process with members, what the members of the others have brought.
    Complete(Vec<(usize, Vec<(usize, Blob)>)>),
    /// It can never be complete; the rank to name, and why.
    Never(usize, FailureCause),
}

impl Hub {
    /// A process brings what all its members bring.
    pub fn bring(
        &mut self,
        process: usize,
        meeting: MeetingKey,
        processes: Vec<usize>,
        parts: Vec<(Part, Blob)>,
    ) -> Arrival {
        let pending = self.meetings.entry(meeting.clone()).or_insert_with(|| Pending {
            processes,
            arrived: BTreeSet::new(),
            brought: Vec::new(),
        });
        let Some(rank) = parts.first().map(|(part, _)| part.rank) else { return Arrival::Waits };
        let first = pending.brought.first().map(|brought| &brought.part);
        let other = |first: &Part| parts.iter().map(|(part, _)| part).find(|part| part.record != first.record);
        if let Some((first, part)) = first.and_then(|first| Some((first, other(first)?))) {
            let [issued, expected] = [part, first].map(|part| Box::new(part.record.clone()));
            return Arrival::Never(part.rank, FailureCause::Mismatch { issued, peer: first.rank, expected });
        }
        pending.arrived.insert(process);
        pending.brought.extend(parts.into_iter().map(|(part, blob)| Brought { process, part, blob }));
        if pending.arrived.len() < pending.processes.len() {
            let gone = pending.processes.iter().any(|other| self.finished.contains(other));
            return if gone { Arrival::Never(rank, FailureCause::Deadlock) } else { Arrival::Waits };
        }
        let Pending { processes, brought, .. } = self.meetings.remove(&meeting).expect("it was there above");
        let others = |process: usize| {
            let others = brought.iter().filter(|brought| brought.process != process);
            (process, others.map(|brought| (brought.part.member, brought.blob.clone())).collect())
        };
        Arrival::Complete(processes.into_iter().map(others).collect())
    }

    /// All ranks of a process have finished. Returns a rank that waits for one of them, if there is one.
    pub fn finish(&mut self, process: usize) -> Option<usize> {
        self.finished.insert(process);
        let waiting = self.meetings.values().find(|pending| pending.processes.contains(&process));
        waiting.and_then(|pending| pending.brought.first()).map(|brought| brought.part.rank)
    }

    /// How many processes have finished.
    pub fn finished(&self) -> usize {
        self.finished.len()
    }
}
