//! What the members of a group in several processes of one host tell each other without the network.

#[cfg(target_os = "linux")]
mod memory;
#[cfg(not(target_os = "linux"))]
#[path = "no_memory.rs"]
mod memory;
#[cfg(all(test, target_os = "linux"))]
pub(crate) mod tests;

pub(crate) use memory::SharedMemory;
#[cfg(all(test, target_os = "linux"))]
pub(crate) use memory::create;

use super::Group;
use std::collections::BTreeSet;

/// What this member has, if all have it, else the reason of the first that has none; a collective.
pub(crate) fn agree<T>(group: &Group, own: Result<T, String>) -> Result<T, String> {
    let reasons = group.all_gather_host(own.as_ref().err().cloned());
    let first = reasons.into_iter().enumerate().find_map(|(member, reason)| Some((member, reason?)));
    match first {
        Some((member, reason)) => Err(format!("rank {}: {reason}", group.ranks()[member])),
        None => own,
    }
}

impl Group {
    /// Whether the processes of all members are on one host: they have its name, and are not more than the launcher
    /// says that it has.
    pub(crate) fn is_on_one_host(&self) -> bool {
        let Some((world, _)) = &self.world else { return true };
        let processes: BTreeSet<usize> = self.ranks.iter().map(|&rank| world.process_of(rank)).collect();
        let is_here = |&rank: &usize| world.host_of(rank) == world.host_of(self.ranks[0]);
        processes.len() <= world.processes_on_host() && self.ranks.iter().all(is_here)
    }
}
