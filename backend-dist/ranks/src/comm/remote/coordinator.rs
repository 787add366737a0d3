//! Process 0's table of the collectives that span processes.

use super::frame::{Blob, Contribution, Member, OpKey};
use crate::comm::failure::FailureCause;
use std::collections::{BTreeSet, HashMap};

/// Collectives that some process has called, but not all.
#[derive(Default)]
pub(crate) struct Coordinator {
    pending: HashMap<OpKey, Pending>,
    finished: BTreeSet<usize>,
    /// Processes to which the process above them can send.
    pub linked: BTreeSet<usize>,
}

struct Pending {
    /// Processes that have members.
    processes: Vec<usize>,
    arrived: BTreeSet<usize>,
    inputs: Vec<Input>,
}

pub(crate) struct Input {
    pub process: usize,
    pub contribution: Contribution,
    pub blob: Blob,
}

impl Input {
    /// Who has brought it.
    pub fn as_member(&self) -> Member {
        (self.contribution.member, self.contribution.rank)
    }
}

/// The state of a collective after a process has called it.
pub(crate) enum Arrival {
    /// Others have yet to call it.
    Waits,
    /// All have: the processes with members, and the inputs of these.
    Complete(Vec<usize>, Vec<Input>),
    /// It can never be complete; the rank to name, and why.
    Never(usize, FailureCause),
    /// The process's frame contradicts an earlier one.
    Invalid(String),
}

impl Coordinator {
    /// The members of a process have called a collective; there is at least one.
    pub fn contribute(
        &mut self,
        process: usize,
        op: OpKey,
        processes: Vec<usize>,
        contributions: Vec<(Contribution, Blob)>,
    ) -> Arrival {
        let pending = self.pending.entry(op.clone()).or_insert_with(|| Pending {
            processes: processes.clone(),
            arrived: BTreeSet::new(),
            inputs: Vec::new(),
        });
        if pending.processes != processes {
            return Arrival::Invalid(format!("other processes for {} than process 0 has heard before", op.group));
        }
        if !pending.arrived.insert(process) {
            return Arrival::Invalid(format!("operation {} of {} twice", op.sequence, op.group));
        }
        let Some(rank) = contributions.first().map(|(contribution, _)| contribution.rank) else {
            return Arrival::Invalid("a collective without an input".into());
        };
        let first = pending.inputs.first().map(|input| &input.contribution);
        let other =
            |first: &Contribution| contributions.iter().map(|(call, _)| call).find(|c| c.record != first.record);
        if let Some((first, call)) = first.and_then(|first| Some((first, other(first)?))) {
            let [issued, expected] = [call, first].map(|call| Box::new(call.record.clone()));
            return Arrival::Never(call.rank, FailureCause::Mismatch { issued, peer: first.rank, expected });
        }
        let inputs = contributions.into_iter().map(|(contribution, blob)| Input { process, contribution, blob });
        pending.inputs.extend(inputs);
        if pending.arrived.len() < pending.processes.len() {
            let gone = pending.processes.iter().any(|other| self.finished.contains(other));
            return if gone { Arrival::Never(rank, FailureCause::Deadlock) } else { Arrival::Waits };
        }
        let Pending { processes, inputs, .. } = self.pending.remove(&op).expect("it was there above");
        Arrival::Complete(processes, inputs)
    }

    /// All ranks of a process have finished. Returns a rank that waits for one of them, if there is one.
    pub fn finish(&mut self, process: usize) -> Option<usize> {
        self.finished.insert(process);
        let waiting = self.pending.values().find(|pending| pending.processes.contains(&process));
        waiting.and_then(|pending| pending.inputs.first()).map(|input| input.contribution.rank)
    }

    /// How many processes have finished.
    pub fn finished(&self) -> usize {
        self.finished.len()
    }
}
