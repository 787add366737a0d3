//! Collectives by DMA copy engines, between GPUs of one process with peer access and one rank each.
//!
//! NCCL's kernels need SMs, which overlapped GEMMs then lack; a DMA copy engine needs none. Every member publishes the
//! address of its source and the event that marks it as complete, and copies its share from the others' sources, on the
//! communicator's stream and in the order of its operations. The host thread of a device waits until all members have
//! reached the operation; the GPU waits for events that were recorded before they were published.
//!
//! Invariants:
//! - A source stays unchanged and at its address until all members have copied it: the compute stream of its owner
//!   waits for that two operations later, when all members have queued the copies and recorded their events (by
//!   [`LocalAllGather`]).
//! - For the same reason two events of a kind are enough for each member: when one is recorded again, all members have
//!   queued their waits.

use super::communicator::Call;
use crate::comm::Group;
use crate::comm::local_all_gather::LocalAllGather;
use cudarc::driver::{result as driver, sys};
use gpu::cuda::PinnedBuffer;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;

/// A member's source in an operation. Raw handles are stored as integers, because they cross threads.
#[derive(Clone)]
pub(crate) struct SharedSource {
    /// The addresses from which others may copy, in an order that all members know.
    addresses: Arc<[usize]>,
    /// The event that marks the source as complete.
    ready: usize,
    /// The event that marks this member's copies as done; recorded when its operation is queued.
    done: usize,
}

/// A range of bytes that a member copies from a member, or from itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pull {
    pub member: usize,
    /// Index of the member's address.
    pub from: usize,
    pub to: usize,
    pub bytes: usize,
    /// The event of the communicator that is recorded after it.
    pub slot: Option<usize>,
}

/// Sources that others may still read, and the events that mark the end of their reads.
struct LentSource {
    operation: u64,
    done: Vec<usize>,
    sources: Vec<PinnedBuffer>,
}

#[derive(Default)]
struct State {
    operations: u64,
    /// Ready and done, of even and of odd operations.
    events: Option<[[usize; 2]; 2]>,
    lent: VecDeque<LentSource>,
}

/// One member's state.
pub(crate) struct DmaCopies {
    board: Arc<LocalAllGather<SharedSource>>,
    member: usize,
    state: Mutex<State>,
}

impl DmaCopies {
    /// This member's state, if DMA copy engines are enabled, all members run in this process, and their GPUs have
    /// access to each other's memory; `gpu` is this member's. A collective.
    pub(super) fn join(group: &Group, gpu: usize) -> Option<Self> {
        if !group.is_in_one_process() {
            return None;
        }
        let wanted = group.uses_copy_engines().then_some(gpu);
        let gpus: Vec<usize> = group.all_gather_host(wanted).into_iter().collect::<Option<_>>()?;
        let reaches = |[from, to]: [usize; 2]| {
            let mut reaches = 0;
            // SAFETY: both are device ordinals, and `reaches` is valid for writes.
            let asked = unsafe { sys::cuDeviceCanAccessPeer(&mut reaches, from as i32, to as i32) }.result();
            asked.is_ok() && reaches == 1
        };
        let mut pairs = gpus.iter().flat_map(|&from| gpus.iter().map(move |&to| [from, to]));
        let all = pairs.all(|pair| pair[0] == pair[1] || reaches(pair));
        all.then(|| Self { board: group.local_all_gather(), member: group.rank(), state: Mutex::default() })
    }

    /// Leaves the sources that peers may still read: the run has failed, so the end of their reads is unknown.
    pub(super) fn abandon(&self) {
        let lent = std::mem::take(&mut self.state.lock().lent);
        lent.into_iter().flat_map(|lent| lent.sources).for_each(PinnedBuffer::abandon);
    }

    /// Queues the copies of an operation, after the queued work of the compute stream. `addresses` are this member's
    /// source addresses, within `sources`.
    pub(crate) fn queue(
        &self,
        call: Call,
        addresses: Vec<usize>,
        pulls: impl IntoIterator<Item = Pull>,
        sources: Vec<PinnedBuffer>,
    ) -> Result<(), String> {
        let mut state = self.state.lock();
        let operation = state.operations;
        state.operations += 1;
        let [ready, done_here] = state.events(operation)?;
        state.release(call, operation)?;
        call.follow()?;
        call.record_compute(ready)?;
        let loan = SharedSource { addresses: addresses.into(), ready, done: done_here };
        let Some(loans) = self.board.all_gather(self.member, operation, loan, || call.has_failed()) else {
            // A peer may have read this source's address before.
            sources.into_iter().for_each(PinnedBuffer::abandon);
            return Err("the run has failed".into());
        };
        let done = loans.iter().map(|loan| loan.done).collect();
        state.lent.push_back(LentSource { operation, done, sources });
        let stream = call.target().1 as sys::CUstream;
        for Pull { member, from, to, bytes, slot } in pulls {
            let SharedSource { addresses, ready, .. } = &loans[member];
            if bytes > 0 {
                if member != self.member {
                    call.wait_for(*ready)?;
                }
                // SAFETY: the caller's ranges are within the buffers; the member's source is complete after `ready` and
                // stays until `done`, and the target's memory is free after the work that the stream waits for.
                unsafe { driver::memcpy_dtod_async(to as u64, addresses[from] as u64, bytes, stream) }
                    .map_err(|error| format!("{bytes} bytes from member {member}: {error}"))?;
            }
            slot.map_or(Ok(()), |slot| call.record(slot))?;
        }
        call.record_event(done_here)
    }
}

impl State {
    /// Ready and done events of an operation, created on first use in the calling thread's context.
    fn events(&mut self, operation: u64) -> Result<[usize; 2], String> {
        let events = match self.events {
            Some(events) => events,
            None => {
                let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
                let event =
                    || driver::event::create(flags).map(|event| event as usize).map_err(|error| error.to_string());
                let events = [[event()?, event()?], [event()?, event()?]];
                *self.events.insert(events)
            }
        };
        Ok(events[usize::from(operation % 2 == 1)])
    }

    /// Releases the sources of the operation two before this one and earlier ones, once the compute stream is here and
    /// all members have copied them.
    fn release(&mut self, call: Call, operation: u64) -> Result<(), String> {
        while self.lent.front().is_some_and(|lent| lent.operation + 2 <= operation) {
            let LentSource { done, sources, .. } = self.lent.pop_front().expect("it was there");
            done.iter().try_for_each(|done| call.compute_waits_for(*done))?;
            drop(sources);
        }
        Ok(())
    }
}

impl Drop for DmaCopies {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        for event in state.events.take().into_iter().flatten().flatten() {
            // SAFETY: no further work is queued; the driver keeps events that streams still wait for.
            let _ = unsafe { driver::event::destroy(event as _) };
        }
    }
}
