//! Which frames make sense. A process must not fail, or wait for ever, because of what another one sends.

use super::frame::{Contribution, Frame, Head, OpKey};
use super::tree::CHILDREN;
use super::{OF_PROCESSES, Remote};

impl Remote {
    /// Whether process `from` may send this frame to this process.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check(&self, from: usize, frame: &Frame) -> Result<(), String> {
        let (here, world) = (self.process, self.processes() * self.share);
        let inputs = match &frame.head {
            Head::Heartbeat => 0,
            Head::Contribute { .. } if here > 0 => {
                return Err("inputs for a collective, which only process 0 takes".into());
            }
            Head::Contribute { op, processes, contributions } => {
                self.check_processes(from, processes)?;
                if contributions.is_empty() {
                    return Err(format!("no input for a collective of {} processes", processes.len()));
                }
                contributions.iter().try_for_each(|contribution| self.check_contribution(from, op, contribution))?;
                contributions.len()
            }
            Head::Gathered { .. } if here == 0 => {
                return Err("inputs of a collective, which only process 0 sends".into());
            }
            Head::Gathered { members, to, .. } => {
                self.check_known(to)?;
                if let Some((_, rank)) = members.iter().find(|(_, rank)| *rank >= world) {
                    return Err(format!("an input of rank {rank} of {world}"));
                }
                members.len()
            }
            #[cfg(any(feature = "cuda", test))]
            Head::Issued { .. } if here > 0 => return Err("operations of GPUs, which only process 0 compares".into()),
            #[cfg(any(feature = "cuda", test))]
            Head::Issued { .. } => 0,
            Head::Linked if here > 0 || from <= CHILDREN => return Err("that another process reaches it".into()),
            Head::Linked => 0,
            Head::Message { receiver, .. } if *receiver >= world => {
                return Err(format!("a tensor for rank {receiver} of {world}"));
            }
            Head::Message { receiver, .. } if here > 0 && self.process_of(*receiver) != here => {
                return Err(format!("a tensor for rank {receiver}, which process {here} does not have"));
            }
            Head::Message { .. } => 1,
            Head::Failed(error) if error.rank >= world || error.ranks.len() != world => {
                return Err(format!("a failure of rank {} of {} ranks, not {world}", error.rank, error.ranks.len()));
            }
            Head::Failed(_) | Head::Finished => 0,
        };
        match frame.blobs.len() == inputs {
            true => Ok(()),
            false => Err(format!("{} blobs instead of {inputs}", frame.blobs.len())),
        }
    }

    fn check_processes(&self, from: usize, processes: &[usize]) -> Result<(), String> {
        self.check_known(processes)?;
        match processes.contains(&from) {
            true => Ok(()),
            false => Err(format!("a collective whose {} processes are not its own", processes.len())),
        }
    }

    fn check_known(&self, processes: &[usize]) -> Result<(), String> {
        let ascending = processes.is_sorted_by(|one, next| one < next);
        let known = processes.last().is_some_and(|last| *last < self.processes());
        match ascending && known {
            true => Ok(()),
            false => Err(format!("a collective whose {} processes are not in order or not known", processes.len())),
        }
    }

    fn check_contribution(&self, from: usize, op: &OpKey, contribution: &Contribution) -> Result<(), String> {
        let Contribution { member, rank, record } = contribution;
        let ranks = from * self.share..(from + 1) * self.share;
        if !ranks.contains(rank) {
            return Err(format!("an input of rank {rank}, which it does not have"));
        }
        if op.group.ends_with(OF_PROCESSES) && (*member, *rank) != (from, ranks.start) {
            return Err(format!("a value of process {member}"));
        }
        match (&record.group, record.sequence) == (&op.group, op.sequence) {
            true => Ok(()),
            false => Err("an input whose operation is another one".into()),
        }
    }
}
