//! Collectives from [`Buffer`] to buffer, overlapped with the compute stream if every rank has its own GPU.

use crate::collective;
use crate::comm::{Group, ReduceOp};
#[cfg(feature = "cuda")]
use crate::overlap::{self, Pending};
use gpu::buffer::Buffer;
#[cfg(not(feature = "cuda"))]
use std::convert::Infallible as Pending;
use std::fmt;

/// Starts to sum the elements over the group. The buffer must not be used before [`Wait::wait`].
pub fn all_reduce(buffer: &Buffer, group: &Group) -> Wait {
    if group.size() == 1 {
        return Wait(None);
    }
    #[cfg(feature = "cuda")]
    if is_linked(buffer, group) {
        return Wait(Some(overlap::all_reduce_in_place(&buffer.tensor(), group)));
    }
    buffer.put(0, collective::all_reduce(buffer.tensor(), ReduceOp::Sum, group));
    Wait(None)
}

/// Starts to write this rank's shard of the sum over the group to `target`, which may be that shard of `source`.
/// Neither may be used before [`Wait::wait`].
pub fn reduce_scatter(source: &Buffer, target: &Buffer, group: &Group) -> Wait {
    #[cfg(feature = "cuda")]
    if is_linked(source, group) {
        return Wait(Some(overlap::reduce_scatter_into(&source.tensor(), &target.tensor(), group)));
    }
    target.put(0, collective::reduce_scatter(source.tensor(), 0, group));
    Wait(None)
}

/// Starts to fill `target` with all ranks' `local` shards; `local` may be this rank's shard of it.
/// Neither may be used before [`Wait::wait`].
pub fn all_gather(local: &Buffer, target: &Buffer, group: &Group) -> Wait {
    #[cfg(feature = "cuda")]
    if is_linked(target, group) {
        return Wait(Some(overlap::all_gather_into(&local.tensor(), &target.tensor(), group)));
    }
    target.put(0, collective::all_gather(local.tensor(), 0, group));
    Wait(None)
}

/// Whether every member has its own GPU; the same on all of them.
#[cfg(feature = "cuda")]
fn is_linked(buffer: &Buffer, group: &Group) -> bool {
    overlap::has_device_link(group, &buffer.tensor().device())
}

/// A collective that overlaps the compute stream.
#[must_use = "nobody may touch the buffers before `wait`"]
pub struct Wait(Option<Pending>);

impl Wait {
    /// Orders all later work of the thread after the collective; the host does not wait.
    pub fn wait(self) {
        // `Pending` does so when it is dropped.
    }
}

impl fmt::Debug for Wait {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "Wait({})", if self.0.is_some() { "running" } else { "done" })
    }
}
