//! Exchanges by copy engines, between GPUs of one process that reach each other's memory and have one rank each.
//!
//! A kernel of NCCL needs multiprocessors, which the products beside it then lack; a copy engine needs none. Every
//! member tells the others where its source lies and which event says that it is complete, and copies from theirs what
//! it wants, on the communicator's stream and in the order of its operations. The host of a device waits until all
//! members have come to the operation; what the GPU waits for are events that were recorded before anybody was told of
//! them.
//!
//! Invariants:
//! - A source stays as and where it is until all members have copied: the compute stream of its owner waits for that
//!   two operations later, where by [`Board`] all have queued the copies and recorded their events.
//! - By the same, two events of a kind are enough for each member: when one is recorded anew, all have queued their
//!   waits.

use super::Held;
use super::communicator::Call;
use crate::comm::Group;
use crate::comm::board::Board;
use crate::ops::copy_engines::are_copy_engines_on;
use cudarc::driver::{result as driver, sys};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

/// What a member lends in an operation. Raw handles are kept as integers: they cross threads.
#[derive(Clone)]
pub(crate) struct Loan {
    /// Where what others may copy begins, in an order that all know.
    addresses: Arc<[usize]>,
    /// The event behind which it is complete.
    ready: usize,
    /// The event that will say that this member has copied what it wants; recorded when its operation is queued.
    done: usize,
}

/// A run of bytes that a member copies from a member, perhaps itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pull {
    pub member: usize,
    /// Which of the member's addresses.
    pub from: usize,
    pub to: usize,
    pub bytes: usize,
    /// The event of the communicator that is recorded behind it.
    pub slot: Option<usize>,
}

/// What others may still read, and the events that say when they have.
struct Lent {
    operation: u64,
    done: Vec<usize>,
    sources: Vec<Held>,
}

#[derive(Default)]
struct State {
    operations: u64,
    /// Ready and done, of even and of odd operations.
    events: Option<[[usize; 2]; 2]>,
    lent: VecDeque<Lent>,
}

/// One member's end.
pub(crate) struct Copies {
    board: Arc<Board<Loan>>,
    member: usize,
    state: Mutex<State>,
}

impl Copies {
    /// This member's end, if copy engines are wanted, all members run in this process, and their GPUs, of which `gpu`
    /// is this one's, reach each other's memory. Collective.
    pub(super) fn join(group: &Group, gpu: usize) -> Option<Self> {
        if !group.is_in_one_process() {
            return None;
        }
        let wanted = are_copy_engines_on().then_some(gpu);
        let gpus: Vec<usize> = group.all_gather_host(wanted).into_iter().collect::<Option<_>>()?;
        let reaches = |[from, to]: [usize; 2]| {
            let mut reaches = 0;
            // SAFETY: both are numbers of devices, and the answer has a place.
            let asked = unsafe { sys::cuDeviceCanAccessPeer(&mut reaches, from as i32, to as i32) }.result();
            asked.is_ok() && reaches == 1
        };
        let mut pairs = gpus.iter().flat_map(|&from| gpus.iter().map(move |&to| [from, to]));
        let all = pairs.all(|pair| pair[0] == pair[1] || reaches(pair));
        all.then(|| Self { board: group.board(), member: group.rank(), state: Mutex::default() })
    }

    /// Keeps for ever what peers may still read: the run has failed, and nobody tells when they are done.
    pub(super) fn abandon(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::forget(std::mem::take(&mut state.lent));
    }

    /// Queues the copies of an operation, behind what the compute stream has queued. `addresses` are where the others
    /// find this member's part of it, in `sources`.
    pub(crate) fn queue(
        &self,
        call: Call,
        addresses: Vec<usize>,
        pulls: impl IntoIterator<Item = Pull>,
        sources: Vec<Held>,
    ) -> Result<(), String> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let operation = state.operations;
        state.operations += 1;
        let [ready, done_here] = state.events(operation)?;
        state.release(call, operation)?;
        call.follow()?;
        call.record_compute(ready)?;
        let loan = Loan { addresses: addresses.into(), ready, done: done_here };
        let Some(loans) = self.board.exchange(self.member, operation, loan, || call.has_failed()) else {
            // A peer may have found this note before.
            std::mem::forget(sources);
            return Err("the run has failed".into());
        };
        let done = loans.iter().map(|loan| loan.done).collect();
        state.lent.push_back(Lent { operation, done, sources });
        let stream = call.target().1 as sys::CUstream;
        for Pull { member, from, to, bytes, slot } in pulls {
            let Loan { addresses, ready, .. } = &loans[member];
            if bytes > 0 {
                if member != self.member {
                    call.wait_for(*ready)?;
                }
                // SAFETY: the caller's runs lie within the buffers; the member's is complete behind `ready` and stays
                // until `done`, and the target's memory is free behind what the stream follows.
                unsafe { driver::memcpy_dtod_async(to as u64, addresses[from] as u64, bytes, stream) }
                    .map_err(|error| format!("{bytes} bytes from member {member}: {error}"))?;
            }
            slot.map_or(Ok(()), |slot| call.record(slot))?;
        }
        call.record_event(done_here)
    }
}

impl State {
    /// Ready and done of an operation, made on first use in the calling thread's context.
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

    /// Lets go of the sources of operations in front of the last, as soon as the compute stream has come here and
    /// everybody has copied them.
    fn release(&mut self, call: Call, operation: u64) -> Result<(), String> {
        while self.lent.front().is_some_and(|lent| lent.operation + 2 <= operation) {
            let Lent { done, sources, .. } = self.lent.pop_front().expect("it was there");
            done.iter().try_for_each(|done| call.compute_waits_for(*done))?;
            drop(sources);
        }
        Ok(())
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        for event in state.events.take().into_iter().flatten().flatten() {
            // SAFETY: nobody queues anything any more; the driver keeps what streams still wait for.
            let _ = unsafe { driver::event::destroy(event as _) };
        }
    }
}
