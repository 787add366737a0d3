//! The context of an operation: both streams, and the events that order them.

use super::Communicator;
use crate::nccl::events::Events;
use crate::timeline;
use cudarc::driver::{result as driver, sys as cuda_sys};
use cudarc::nccl::sys as nccl_sys;

/// The context of a call for a communicator, on the device's thread.
#[derive(Clone, Copy)]
pub(crate) struct Call<'a> {
    pub(super) link: &'a Communicator,
    pub(super) compute: cuda_sys::CUstream,
    /// Recorded again when the operation begins, if a timeline is on.
    pub(super) begin: Option<usize>,
}

impl Call<'_> {
    /// The arguments of an NCCL operation.
    pub(crate) fn target(self) -> (nccl_sys::ncclComm_t, nccl_sys::cudaStream_t) {
        (self.link.comm as _, self.link.stream as _)
    }

    /// The rank's compute stream.
    pub(crate) fn compute(self) -> cuda_sys::CUstream {
        self.compute
    }

    /// The communicator's pool of events.
    pub(crate) fn events(&self) -> &Events {
        &self.link.events
    }

    /// Whether the run has failed, so that peers may never arrive.
    pub(crate) fn has_failed(&self) -> bool {
        self.link.member.has_failed()
    }

    /// Whether the compute stream's work is recorded for a CUDA graph, not run. The communicator's stream is recorded
    /// with it from [`follow`](Self::follow) to [`lead`](Self::lead). Replays do not pass through here: the watchdog
    /// times none of their collectives.
    pub(crate) fn is_recorded(self) -> Result<bool, String> {
        let mut status = cuda_sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is CubeCL's, alive in a call.
        let asked = unsafe { cuda_sys::cuStreamIsCapturing(self.compute, &mut status) };
        asked.result().map_err(|error| error.to_string())?;
        Ok(status != cuda_sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// Lets the communicator's stream wait for the queued work of the compute stream. The operation begins after it.
    pub(crate) fn follow(self) -> Result<(), String> {
        self.order(self.link.inputs_ready, self.compute, self.link.stream as _)?;
        self.begin.map_or(Ok(()), |event| stamp(event, self.link.stream as _))
    }

    /// Lets the compute stream wait for the queued work of the communicator's stream.
    pub(crate) fn lead(self) -> Result<(), String> {
        self.stalling(|| self.order(self.link.done, self.link.stream as _, self.compute))
    }

    /// Records the event of `slot` after the queued work of the communicator's stream.
    pub(crate) fn record(self, slot: usize) -> Result<(), String> {
        stamp(self.link.events.get(slot)?, self.link.stream as _)
    }

    /// Records `event` after the queued work of the communicator's stream.
    pub(crate) fn record_event(self, event: usize) -> Result<(), String> {
        stamp(event, self.link.stream as _)
    }

    /// Records `event` after the queued work of the compute stream.
    pub(crate) fn record_compute(self, event: usize) -> Result<(), String> {
        stamp(event, self.compute)
    }

    /// Lets the communicator's stream wait for the last record of `event`, which may be of another GPU.
    pub(crate) fn wait_for(self, event: usize) -> Result<(), String> {
        behind(self.link.stream as _, event)
    }

    /// Lets the compute stream wait for the last record of `event`, which may be of another GPU.
    pub(crate) fn compute_waits_for(self, event: usize) -> Result<(), String> {
        self.stalling(|| behind(self.compute, event))
    }

    /// Lets the compute stream wait for the event of `slot`.
    pub(crate) fn wait(self, slot: usize) -> Result<(), String> {
        let event = self.link.events.get(slot)?;
        self.stalling(|| behind(self.compute, event))
    }

    /// Runs `wait`, which makes the compute stream wait, between two time stamps if a timeline is on.
    fn stalling(self, wait: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
        let Some([begin, end]) = timeline::stall(self.compute) else { return wait() };
        stamp(begin, self.compute)?;
        wait()?;
        stamp(end, self.compute)
    }

    fn order(self, event: usize, first: cuda_sys::CUstream, then: cuda_sys::CUstream) -> Result<(), String> {
        stamp(event, first)?;
        behind(then, event)
    }
}

/// Lets `stream` wait for the last record of `event`.
fn behind(stream: cuda_sys::CUstream, event: usize) -> Result<(), String> {
    let wait = cuda_sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
    // SAFETY: streams and events live as long as the communicators of a run that has not ended.
    unsafe { driver::stream::wait_event(stream, event as _, wait) }.map_err(|error| error.to_string())
}

/// Records `event` after the queued work of `stream`.
pub(super) fn stamp(event: usize, stream: cuda_sys::CUstream) -> Result<(), String> {
    // SAFETY: the reader of the event destroys it afterwards, and the caller's stream is alive.
    unsafe { driver::event::record(event as _, stream) }.map_err(|error| error.to_string())
}
