//! The watchdog of a communicator, and its end: in order, or by force if a peer is gone.

use super::{Communicator, Mark};
use crate::comm::DeviceLink;
use crate::comm::abort::{self, Abort};
use crate::nccl::library::{free_raised, raise, text};
use crate::one_shot::OneShot;
use cudarc::driver::{result as driver, sys as cuda_sys};
use cudarc::nccl::{result as nccl, sys as nccl_sys};
use gpu::memory_use::ledger;
use std::sync::atomic::Ordering;
use std::time::Duration;

impl DeviceLink for Communicator {
    /// Fails the run if NCCL has an error or an operation takes too long. Does not wait.
    fn check(&self) {
        let Some(mut watched) = self.calls.try_lock() else {
            if let Some(Mark { op, sequence, since, .. }) = self.entering().clone() {
                self.member.time_out(op, sequence, since);
            }
            return;
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
        match watched.check(|| self.has_passed(), |newest| self.record_progress(newest.stream)) {
            Ok(None) => {}
            Ok(Some(Mark { op, sequence, since, .. })) => self.member.time_out(op, sequence, since),
            Err(error) => self.member.fail(&format!("the GPU has failed: {error}")),
        }
    }

    /// Ends the communicator: its kernels stop immediately. May wait for as long as NCCL needs.
    fn abort(&self) {
        // Before the end, which waits for the device's thread, and that may wait for the GPU; and after it, when no
        // further call begins.
        self.existing_one_shot().into_iter().for_each(OneShot::stop);
        self.end(|| {
            let (rank, group) = &self.place;
            abort::abort(self, &format!("{group} of member {rank}"), abort::LIMIT)
        });
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
        let mut is_destroyed = false;
        self.end(|| {
            while self.inside().is_some() {
                std::thread::sleep(Duration::from_millis(2));
            }
            // SAFETY: this is the only end of the communicator, and no call runs or begins. An error is none of the run.
            is_destroyed = unsafe { nccl::comm_destroy(self.comm as _) }.is_ok();
            true
        });
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
    /// While a rank's thread records a CUDA graph, other threads may ask the driver nothing unless they say that their calls
    /// do not concern it. No event of a recording is asked for.
    fn enter_watchdog(&self) -> Result<(), driver::DriverError> {
        let mut mode = cuda_sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the context lives as long as the process.
        unsafe {
            driver::ctx::set_current(self.context as _)?;
            cuda_sys::cuThreadExchangeStreamCaptureMode(&mut mode).result()
        }
    }

    /// Whether what `progress` was recorded behind has ended.
    fn has_passed(&self) -> Result<bool, driver::DriverError> {
        self.enter_watchdog()?;
        // SAFETY: the event lives as long as the communicator.
        let asked = unsafe { driver::event::query(self.progress as _) };
        match asked {
            Err(driver::DriverError(cuda_sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            asked => asked.map(|()| true),
        }
    }

    /// Records `progress` behind the work of a stream of this GPU; not while the stream is recorded for a graph.
    fn record_progress(&self, stream: usize) -> Result<bool, driver::DriverError> {
        self.enter_watchdog()?;
        let mut status = cuda_sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: event and stream live as long as the communicator, whose calls wait for the lock that the watchdog has.
        unsafe {
            cuda_sys::cuStreamIsCapturing(stream as _, &mut status).result()?;
            if status != cuda_sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
                return Ok(false);
            }
            driver::event::record(self.progress as _, stream as _)?;
        }
        Ok(true)
    }
}

impl Abort for Communicator {
    fn raise(&self) -> Result<(), String> {
        // SAFETY: this is the only end of the communicator.
        unsafe { raise(self.comm) }
    }

    fn inside(&self) -> Option<String> {
        match self.calls.try_lock() {
            // Later calls see that it has ended, and do not enter.
            Some(_) => None,
            None => Some(match self.entering().clone() {
                Some(Mark { op, sequence, since, .. }) => {
                    format!("{} for {:.1} s", self.member.words(op, sequence), since.elapsed().as_secs_f64())
                }
                None => "a thread that asks for its state".into(),
            }),
        }
    }

    fn is_in_use(&self) -> bool {
        // A kernel of one that was set up meanwhile must not keep the stream busy.
        self.existing_one_shot().into_iter().for_each(OneShot::stop);
        if !self.member.has_stopped() || self.queued.load(Ordering::Acquire) > 0 {
            return true;
        }
        if self.enter_watchdog().is_err() {
            return false;
        }
        // SAFETY: the stream lives as long as the communicator.
        let is_idle = unsafe { cuda_sys::cuStreamQuery(self.stream as _) };
        // What has failed does nothing more.
        is_idle == cuda_sys::CUresult::CUDA_ERROR_NOT_READY
    }

    fn free(&self) -> Result<(), String> {
        free_raised()
    }
}

impl Communicator {
    /// Ends it by `how`, which says whether it is gone, unless it has been ended before.
    fn end(&self, how: impl FnOnce() -> bool) {
        // No call begins from here on.
        if self.has_ended.swap(true, Ordering::AcqRel) {
            return;
        }
        // SAFETY: the context lives as long as the process. An error here is no error of the run.
        let _ = unsafe { driver::ctx::set_current(self.context as _) };
        if how() {
            ledger::remove(ledger::Kind::Communicator, self.taken.0, self.taken.1);
            self.is_gone.store(true, Ordering::Release);
        }
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
