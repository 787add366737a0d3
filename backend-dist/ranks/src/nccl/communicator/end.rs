//! The watchdog of a communicator, and its end: in order, or by force if a peer is gone.

use super::{Communicator, Mark};
use crate::comm::DeviceLink;
use crate::gpu::memory_use::ledger;
use crate::nccl::library::text;
use crate::one_shot::OneShot;
use cudarc::driver::{result as driver, sys as cuda_sys};
use cudarc::nccl::{result as nccl, sys as nccl_sys};
use std::sync::TryLockError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long the end of a run waits for a call of the device's thread to return.
const CALL: Duration = Duration::from_secs(2);

impl DeviceLink for Communicator {
    /// Fails the run if NCCL has an error or an operation takes too long. Does not wait.
    fn check(&self) {
        let mut mark = match self.calls.try_lock() {
            Ok(mark) => mark,
            Err(TryLockError::Poisoned(error)) => error.into_inner(),
            Err(TryLockError::WouldBlock) => {
                if let Some(Mark { op, sequence, since }) = self.entering().clone() {
                    self.member.time_out(op, sequence, since);
                }
                return;
            }
        };
        if !self.is_live() {
            return;
        }
        let mut error = nccl_sys::ncclResult_t::ncclSuccess;
        // SAFETY: the communicator has not ended, and does not end while the lock is held.
        let asked = unsafe { nccl_sys::ncclCommGetAsyncError(self.comm as _, &mut error) }.result();
        if let Err(error) = asked.and(error.result()) {
            self.member.fail(&text(error));
        }
        if let Some(Mark { since, op, sequence }) = mark.take() {
            // While a rank's thread records a CUDA graph, other threads may ask the driver nothing unless they say that
            // their calls do not concern it. No event of a recording is asked for.
            let mut mode = cuda_sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
            // SAFETY: the context lives as long as the process, the event as long as the communicator.
            let has_passed = unsafe {
                driver::ctx::set_current(self.context as _)
                    .and_then(|()| cuda_sys::cuThreadExchangeStreamCaptureMode(&mut mode).result())
                    .and_then(|()| driver::event::query(self.progress as _))
            };
            match has_passed {
                Ok(()) => {}
                Err(driver::DriverError(cuda_sys::CUresult::CUDA_ERROR_NOT_READY)) => {
                    self.member.time_out(op.clone(), sequence, since);
                    *mark = Some(Mark { since, op, sequence });
                }
                Err(error) => self.member.fail(&format!("the GPU has failed: {error}")),
            }
        }
    }

    /// Ends the communicator: its kernels stop immediately. May wait for as long as NCCL needs.
    fn abort(&self) {
        // Before the end, which waits for the device's thread, and that may wait for the GPU; and after it, when no
        // further call begins.
        self.existing_one_shot().into_iter().for_each(OneShot::stop);
        self.end(nccl::comm_abort);
        self.existing_one_shot().into_iter().for_each(OneShot::stop);
        if let Some(Some(copies)) = self.copies.get() {
            copies.abandon();
        }
    }

    /// Ends the communicator once its operations have ended. Waits for the other members to do the same.
    fn destroy(&self) {
        // The rank may have ended before the device's thread has run its queued calls, which the peers wait for.
        while self.queued.load(Ordering::Acquire) > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        // Copies from the peers' memory, which is freed when all members are here. SAFETY: the context lives as long as
        // the process, the stream as long as the communicator. An error no longer concerns the run.
        unsafe {
            let _ = driver::ctx::set_current(self.context as _)
                .and_then(|()| driver::stream::synchronize(self.stream as _));
        }
        let one_shot = self.existing_one_shot();
        if let Some(one_shot) = one_shot {
            // Its kernels are on the compute stream.
            let _ = driver::ctx::synchronize();
            one_shot.close();
        }
        // NCCL's end is a collective within a host: then all have closed this member's memory.
        let is_destroyed = self.end(nccl::comm_destroy);
        one_shot.filter(|_| is_destroyed).into_iter().for_each(OneShot::free);
    }

    /// Whether it has not ended yet.
    fn is_live(&self) -> bool {
        !self.has_ended.load(Ordering::Acquire)
    }

    /// Whether its end is complete.
    fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Acquire)
    }
}

impl Communicator {
    /// Whether this call is the one that ends it, without an error.
    fn end(&self, how: unsafe fn(nccl_sys::ncclComm_t) -> Result<nccl::NcclStatus, nccl::NcclError>) -> bool {
        if self.has_ended.swap(true, Ordering::AcqRel) {
            return false;
        }
        // No call begins from here on. A running call may itself wait for a peer that is gone, while it sets up a first
        // connection: only an abort ends that.
        let start = Instant::now();
        let calls = loop {
            match self.calls.try_lock() {
                Ok(calls) => break Some(calls),
                Err(TryLockError::Poisoned(error)) => break Some(error.into_inner()),
                Err(TryLockError::WouldBlock) if start.elapsed() > CALL => break None,
                Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        // Later calls see that it has ended; they need not wait for the end to be complete.
        drop(calls);
        // SAFETY: this is the only end of the communicator. An error here is no error of the run.
        let ended = unsafe {
            let _ = driver::ctx::set_current(self.context as _);
            how(self.comm as _)
        };
        ledger::remove(ledger::Kind::Communicator, self.taken.0, self.taken.1);
        self.is_gone.store(true, Ordering::Release);
        ended.is_ok()
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if !self.is_gone() {
            return;
        }
        // SAFETY: no queued or waiting work refers to them; the driver lets the last work end. A handle that cannot be
        // destroyed is a small leak, no error of the run.
        unsafe {
            let _ = driver::stream::destroy(self.stream as _);
            for event in [self.inputs_ready, self.done, self.progress] {
                let _ = driver::event::destroy(event as _);
            }
        }
    }
}
