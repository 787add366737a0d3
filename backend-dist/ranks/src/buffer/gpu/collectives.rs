//! Collectives from buffer to buffer, overlapped with the compute stream if every rank has its own GPU.

use super::Buffer;
use crate::collective;
use crate::comm::{Group, ReduceOp};
use crate::overlap::{self, Pending};
use std::fmt;

impl Buffer {
    /// Starts to sum the elements over the group. The buffer must not be used before [`Wait::wait`].
    pub fn all_reduce(&self, group: &Group) -> Wait {
        if group.size() == 1 {
            return Wait(None);
        }
        if self.is_linked(group) {
            return Wait(Some(overlap::all_reduce_in_place(&self.tensor(), group)));
        }
        self.put(0, collective::all_reduce(self.tensor(), ReduceOp::Sum, group));
        Wait(None)
    }

    /// Starts to write this rank's shard of the sum over the group to `target`, which may be that shard of this buffer.
    /// Neither may be used before [`Wait::wait`].
    pub fn reduce_scatter(&self, target: &Buffer, group: &Group) -> Wait {
        if self.is_linked(group) {
            return Wait(Some(overlap::reduce_scatter_into(&self.tensor(), &target.tensor(), group)));
        }
        target.put(0, collective::reduce_scatter(self.tensor(), 0, group));
        Wait(None)
    }

    /// Starts to fill this buffer with all ranks' `local` shards; `local` may be this rank's shard of the buffer.
    /// Neither may be used before [`Wait::wait`].
    pub fn all_gather(&self, local: &Buffer, group: &Group) -> Wait {
        if self.is_linked(group) {
            return Wait(Some(overlap::all_gather_into(&local.tensor(), &self.tensor(), group)));
        }
        self.put(0, collective::all_gather(local.tensor(), 0, group));
        Wait(None)
    }

    /// Whether every member has its own GPU; the same on all of them.
    fn is_linked(&self, group: &Group) -> bool {
        overlap::has_device_link(group, &self.tensor().device())
    }
}

/// A collective that overlaps the compute stream.
#[must_use = "nobody may touch the buffers before `wait`"]
pub struct Wait(Option<Pending>);

impl Wait {
    /// Orders all later work of the thread after the collective; the host does not wait.
    pub fn wait(self) {
        if let Some(pending) = self.0 {
            pending.wait();
        }
    }
}

impl fmt::Debug for Wait {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "Wait({})", if self.0.is_some() { "running" } else { "done" })
    }
}
