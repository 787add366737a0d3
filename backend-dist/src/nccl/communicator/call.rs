//! What an operation works with: both streams, and the events that order them.

use super::Communicator;
use crate::nccl::events::Events;
use crate::timeline;
use cudarc::driver::{result as driver, sys as cuda_sys};
use cudarc::nccl::sys as nccl_sys;

/// What a call for a communicator works with, on the device's thread.
#[derive(Clone, Copy)]
pub(crate) struct Call<'a> {
    pub(super) link: &'a Communicator,
    pub(super) compute: cuda_sys::CUstream,
    /// To be recorded again where the operation begins, if a timeline is on.
    pub(super) begin: Option<usize>,
}

impl Call<'_> {
    /// The arguments of an NCCL operation.
    pub(crate) fn target(self) -> (nccl_sys::ncclComm_t, nccl_sys::cudaStream_t) {
        (self.link.comm as _, self.link.stream as _)
    }

    /// The stream that the rank computes on.
    pub(crate) fn compute(self) -> cuda_sys::CUstream {
        self.compute
    }

    /// The communicator's pool of events.
    pub(crate) fn events(&self) -> &Events {
        &self.link.events
    }

    /// Lets the communicator's stream wait for what the compute stream has queued. The operation begins behind that.
    pub(crate) fn follow(self) -> Result<(), String> {
        self.order(self.link.inputs_ready, self.compute, self.link.stream as _)?;
        self.begin.map_or(Ok(()), |event| stamp(event, self.link.stream as _))
    }

    /// Lets the compute stream wait for what the communicator's stream has queued.
    pub(crate) fn lead(self) -> Result<(), String> {
        self.stalling(|| self.order(self.link.done, self.link.stream as _, self.compute))
    }

    /// Marks where the communicator's stream stands with the event of `slot`.
    pub(crate) fn record(self, slot: usize) -> Result<(), String> {
        let event = self.link.events.get(slot)?;
        // SAFETY: stream and event live as long as the communicator, which `self` borrows.
        unsafe { driver::event::record(event as _, self.link.stream as _) }.map_err(|error| error.to_string())
    }

    /// Lets the compute stream wait for the mark of `slot`.
    pub(crate) fn wait(self, slot: usize) -> Result<(), String> {
        let event = self.link.events.get(slot)?;
        let wait = cuda_sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: as in `record`; the compute stream was handed to this call.
        let wait = || unsafe { driver::stream::wait_event(self.compute, event as _, wait) };
        self.stalling(|| wait().map_err(|error| error.to_string()))
    }

    /// `wait`, which makes the compute stream wait, between two stamps if a timeline is on.
    fn stalling(self, wait: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
        let Some([begin, end]) = timeline::stall(self.compute) else { return wait() };
        stamp(begin, self.compute)?;
        wait()?;
        stamp(end, self.compute)
    }

    fn order(self, event: usize, first: cuda_sys::CUstream, then: cuda_sys::CUstream) -> Result<(), String> {
        let wait = cuda_sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: as in `wait`.
        unsafe {
            driver::event::record(event as _, first)
                .and_then(|()| driver::stream::wait_event(then, event as _, wait))
                .map_err(|error| error.to_string())
        }
    }
}

/// Records an event of a timeline.
pub(super) fn stamp(event: usize, stream: cuda_sys::CUstream) -> Result<(), String> {
    // SAFETY: whoever reads the event destroys it after that, and the caller's stream is live.
    unsafe { driver::event::record(event as _, stream) }.map_err(|error| error.to_string())
}
