//! Collectives from buffer to buffer, beside the compute stream where every rank has a GPU of its own.

use super::Buffer;
use crate::collective;
use crate::comm::{Group, ReduceOp};
use crate::overlap::{self, Pending};
use std::fmt;

impl Buffer {
    /// Starts to sum the elements over the group. Nobody may touch the buffer before [`Wait::wait`].
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

    /// Starts to write this rank's part of the sum over the group to `target`, which may be that part of this buffer.
    /// Nobody may touch either before [`Wait::wait`].
    pub fn reduce_scatter(&self, target: &Buffer, group: &Group) -> Wait {
        if self.is_linked(group) {
            return Wait(Some(overlap::reduce_scatter_into(&self.tensor(), &target.tensor(), group)));
        }
        target.put(0, collective::reduce_scatter(self.tensor(), 0, group));
        Wait(None)
    }

    /// Starts to fill this buffer with all ranks' `own` parts, which may be this rank's part of the buffer. Nobody may
    /// touch either before [`Wait::wait`].
    pub fn all_gather(&self, own: &Buffer, group: &Group) -> Wait {
        if self.is_linked(group) {
            return Wait(Some(overlap::all_gather_into(&own.tensor(), &self.tensor(), group)));
        }
        self.put(0, collective::all_gather(own.tensor(), 0, group));
        Wait(None)
    }

    /// Whether every member has a GPU of its own; the same on all of them.
    fn is_linked(&self, group: &Group) -> bool {
        overlap::has_device_link(group, &self.tensor().device())
    }
}

/// A collective that runs beside the compute stream.
#[must_use = "nobody may touch the buffers before `wait`"]
pub struct Wait(Option<Pending>);

impl Wait {
    /// What the thread issues from now on finds the result; the host does not wait.
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
