//! What the members of groups on several hosts have issued, as process 0 hears of it.
//!
//! There is no memory that they could share. Each process reports a few times a second what its ranks have issued since
//! the last time, and process 0 compares. Nobody waits for it, and nothing is done for it when an operation is issued
//! but to note the operation.

use super::{DIMS, DeviceOp, DeviceOpKind, Disagreement, FlightRecorder};
use crate::comm::FailureCause;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::ops::Range;

/// What one member of a group has issued since its last report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Report {
    /// The group's number in the process that reports.
    pub group: usize,
    /// Its label and the global ranks of its members, in the first report of the process about it.
    pub definition: Option<(String, Vec<usize>)>,
    pub member: usize,
    /// How many operations the member had issued before these.
    pub first: u64,
    pub ops: Vec<DeviceOp>,
    /// Whether the rank has finished, and issues no more.
    pub has_finished: bool,
}

/// The flight recorder of all groups that processes report of.
#[derive(Default)]
pub(crate) struct ReportedOps {
    /// Its groups are those of `groups`, in this order.
    recorder: FlightRecorder,
    groups: Vec<ReportedGroup>,
    by_label: HashMap<String, usize>,
    /// By process and its number of the group.
    by_number: HashMap<(usize, usize), usize>,
}

struct ReportedGroup {
    label: String,
    ranks: Vec<usize>,
    /// Per member.
    has_finished: Vec<bool>,
}

impl ReportedOps {
    /// Takes in a report of `process`, which hosts the ranks `hosted` of `world` in all. Returns the rank that must be
    /// named and why, if the members of the group will wait for each other for ever.
    ///
    /// # Errors
    /// What contradicts earlier reports, or makes no sense.
    pub(crate) fn take(
        &mut self,
        process: usize,
        hosted: Range<usize>,
        world: usize,
        report: Report,
    ) -> Result<Option<(usize, FailureCause)>, String> {
        let Report { group: number, definition, member, first, ops, has_finished } = report;
        if let Some((label, ranks)) = definition {
            let index = self.define(label, ranks, world)?;
            self.by_number.insert((process, number), index);
        }
        let index = self.by_number.get(&(process, number));
        let index = *index.ok_or_else(|| format!("operations of a group {number} without its name"))?;
        let group = &mut self.groups[index];
        let rank = group.ranks.get(member).copied().filter(|rank| hosted.contains(rank));
        let rank = rank.ok_or_else(|| format!("operations of member {member} of {}", group.label))?;
        let issued = self.recorder.issued(index, member);
        if first != issued {
            return Err(format!("operation {first} of {} after operation {issued}", group.label));
        }
        for (sequence, op) in (first..).zip(&ops) {
            if op.rank > DIMS || (op.kind == DeviceOpKind::Message && group.ranks.len() != 2) {
                return Err(format!("an operation that {} does not have", group.label));
            }
            let record = |member, op: &DeviceOp| Box::new(op.record(&group.label, &group.ranks, member, sequence));
            if let Err(Disagreement { peer, theirs }) = self.recorder.issue(index, member, op) {
                let (issued, expected) = (record(member, op), record(peer, &theirs));
                return Ok(Some((rank, FailureCause::Mismatch { issued, peer: group.ranks[peer], expected })));
            }
            let is_absent = |peer: &usize| group.has_finished[*peer] && self.recorder.issued(index, *peer) <= sequence;
            if let Some(absent) = (0..group.ranks.len()).find(is_absent) {
                let waiting_in = record(member, op);
                return Ok(Some((group.ranks[absent], FailureCause::Missing { peer: rank, waiting_in })));
            }
        }
        group.has_finished[member] |= has_finished;
        let missed = self.recorder.missed(index, member).filter(|_| has_finished);
        Ok(missed.map(|(sequence, peer, op)| {
            let waiting_in = Box::new(op.record(&group.label, &group.ranks, peer, sequence));
            (rank, FailureCause::Missing { peer: group.ranks[peer], waiting_in })
        }))
    }

    fn define(&mut self, label: String, ranks: Vec<usize>, world: usize) -> Result<usize, String> {
        if ranks.len() < 2 || ranks.iter().any(|rank| *rank >= world) {
            return Err(format!("a group of {} ranks that are not all of {world}", ranks.len()));
        }
        let index = *self.by_label.entry(label).or_insert_with_key(|label| {
            self.recorder.add_group(ranks.iter().map(|_| true));
            let has_finished = vec![false; ranks.len()];
            self.groups.push(ReportedGroup { label: label.clone(), ranks: ranks.clone(), has_finished });
            self.groups.len() - 1
        });
        match self.groups[index].ranks == ranks {
            true => Ok(index),
            false => Err(format!("other members of {} than process 0 has heard before", self.groups[index].label)),
        }
    }
}

#[cfg(test)]
mod tests;
