//! One rank's end of a group's communicator, with a stream of its own.
//!
//! Invariants:
//! - All calls for a communicator come from the device's thread in CubeCL, in the order in which the rank has issued them,
//!   under `calls`. Only the watchdog, which holds nobody up, and the end of the run come from elsewhere.
//! - `cuStreamWaitEvent` waits for the record that the event holds *when it is called*. `inputs_ready` and `done` are
//!   recorded and waited for within one call of the device's thread, so one of each is enough. An operation that is
//!   waited for later has an event of its own from `events` from before its record until after its wait.

use super::events::Events;
use super::join;
use super::library::text;
use crate::comm::{DeviceOp, Group, Member, PATIENCE};
use crate::cuda;
use crate::gpu::memory_use::ledger;
use crate::startup::{Phase, phase};
use crate::timeline::{self, ExchangeKind};
use burn_cubecl::tensor::CubeTensor;
use cudarc::driver::{result as driver, sys as cuda_sys};
use cudarc::nccl::{result as nccl, sys as nccl_sys};
use std::any::Any;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// How long the end of a run waits for a call of the device's thread to return by itself.
const CALL: Duration = Duration::from_secs(2);

/// Raw handles are kept as integers: they cross threads.
pub(crate) struct Communicator {
    member: Member,
    /// This rank among the members, and the group's name.
    place: (usize, String),
    context: usize,
    comm: usize,
    stream: usize,
    inputs_ready: usize,
    done: usize,
    progress: usize,
    pub(crate) events: Events,
    calls: Mutex<Option<Mark>>,
    /// Calls that the device's thread has not run yet.
    queued: AtomicUsize,
    has_ended: AtomicBool,
    is_gone: AtomicBool,
    /// The GPU, and the bytes of it that went when the communicator was made.
    taken: (usize, u64),
}

/// The operation behind which `progress` was recorded last, while it has not been seen to end.
struct Mark {
    since: Instant,
    op: DeviceOp,
    sequence: u64,
}

/// A call that is queued; it counts until it has run or is dropped.
struct Queued(Arc<Communicator>);

impl Queued {
    fn new(link: &Arc<Communicator>) -> Self {
        link.queued.fetch_add(1, Ordering::AcqRel);
        Self(link.clone())
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        self.0.queued.fetch_sub(1, Ordering::AcqRel);
    }
}

/// What a call for a communicator works with, on the device's thread.
#[derive(Clone, Copy)]
pub(crate) struct Call<'a> {
    link: &'a Communicator,
    compute: cuda_sys::CUstream,
    /// To be recorded again where the operation begins, if a timeline is on.
    begin: Option<usize>,
}

impl Communicator {
    /// Joins the communicator of `group`; every member must call this, from the rank's thread. Its kernels have at most
    /// `blocks` thread blocks, or as many as NCCL finds good.
    ///
    /// # Errors
    /// Without NCCL, with different versions of it, and whatever NCCL says.
    pub(crate) fn join(group: &Group, device: usize, blocks: Option<i32>) -> Result<Arc<Self>, String> {
        phase(Phase::Connect, || Self::joined(group, device, blocks))
    }

    fn joined(group: &Group, device: usize, blocks: Option<i32>) -> Result<Arc<Self>, String> {
        let id = join::agree(group)?;
        // SAFETY: the context is the device's primary one, which CubeCL retains for the life of the process.
        let context = unsafe {
            let context = driver::primary_ctx::retain(device as i32).map_err(|error| error.to_string())?;
            driver::ctx::set_current(context).map_err(|error| error.to_string())?;
            context as usize
        };
        let free = || driver::mem_get_info().map_or(0, |(free, _)| free as u64);
        let before = free();
        let comm = join::meet(group, context, id, blocks)?;
        let taken = (device, before.saturating_sub(free()));
        ledger::add(ledger::Kind::Communicator, taken.0, taken.1);
        let event = || {
            let event = driver::event::create(cuda_sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
            event.map(|event| event as usize).map_err(|error| error.to_string())
        };
        // The highest priority: what waits for peers should start before more of what does not.
        let stream = driver::stream::get_priority_range()
            .and_then(|(_, highest)| {
                driver::stream::create_with_priority(driver::stream::StreamKind::NonBlocking, highest)
            })
            .map_err(|error| error.to_string())?;
        Ok(Arc::new(Self {
            member: group.as_member(),
            place: (group.rank(), group.name().to_string()),
            context,
            comm,
            stream: stream as usize,
            inputs_ready: event()?,
            done: event()?,
            progress: event()?,
            events: Events::default(),
            calls: Mutex::new(None),
            queued: AtomicUsize::new(0),
            has_ended: AtomicBool::new(false),
            is_gone: AtomicBool::new(false),
            taken,
        }))
    }

    /// Runs `work(call, buffers)`, which queues operation `sequence`, `op`, on the communicator's stream, on the device's
    /// thread; an error or a panic in it ends the run. `work` does not run if the communicator has ended.
    pub(crate) fn queue<const N: usize>(
        self: &Arc<Self>,
        (sequence, op): (u64, DeviceOp),
        tensors: [&CubeTensor; N],
        work: impl FnOnce(Call, [*mut c_void; N]) -> Result<(), String> + Send + 'static,
    ) {
        self.submit(tensors, move |call, buffers| {
            let mut mark = call.link.lock();
            if !call.link.is_live() {
                return Err("the communicator has ended".into());
            }
            let (member, group) = &call.link.place;
            let times = timeline::exchange(call.compute, ExchangeKind::of(op.kind(), *member), group);
            let begin = times.map(|[begin, _]| begin);
            begin.map_or(Ok(()), |event| stamp(event, call.link.stream as _))?;
            work(Call { begin, ..call }, buffers)?;
            times.map_or(Ok(()), |[_, end]| stamp(end, call.link.stream as _))?;
            if mark.is_none() {
                // SAFETY: event and stream live as long as the communicator. The last record has been seen to end.
                unsafe { driver::event::record(call.link.progress as _, call.link.stream as _) }
                    .map_err(|error| error.to_string())?;
                *mark = Some(Mark { since: Instant::now(), op, sequence });
            }
            Ok(())
        });
    }

    /// Runs `work(call, buffers)`, which makes no use of NCCL, on the device's thread.
    pub(crate) fn submit<const N: usize>(
        self: &Arc<Self>,
        tensors: [&CubeTensor; N],
        work: impl FnOnce(Call, [*mut c_void; N]) -> Result<(), String> + Send + 'static,
    ) {
        let (queued, failed) = (Queued::new(self), self.clone());
        let work = move |buffers, compute| {
            // CubeCL would only log a panic, and the peers would wait for ever.
            let call = Call { link: &queued.0, compute, begin: None };
            catch_unwind(AssertUnwindSafe(|| work(call, buffers))).unwrap_or_else(|payload| Err(panic_text(&*payload)))
        };
        let index = usize::from(tensors[0].client.service_id().device.index_id);
        cuda::submit(tensors, work, move |message| {
            failed.member.fail(&crate::gpu::out_of_memory_on(index, &message).unwrap_or(message));
        });
        cuda::flush(tensors[0]);
    }

    /// Fails the run if NCCL has met an error or an operation has not ended for too long. Does not wait.
    pub(crate) fn check(&self) {
        let mut mark = match self.calls.try_lock() {
            Ok(mark) => mark,
            Err(TryLockError::Poisoned(error)) => error.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        if !self.is_live() {
            return;
        }
        let mut error = nccl_sys::ncclResult_t::ncclSuccess;
        // SAFETY: the communicator has not ended, and does not while the lock is held.
        let asked = unsafe { nccl_sys::ncclCommGetAsyncError(self.comm as _, &mut error) }.result();
        if let Err(error) = asked.and(error.result()) {
            self.member.fail(&text(error));
        }
        if let Some(Mark { since, op, sequence }) = mark.take() {
            // SAFETY: the context lives as long as the process, the event as long as the communicator.
            let has_passed = unsafe {
                driver::ctx::set_current(self.context as _).and_then(|()| driver::event::query(self.progress as _))
            };
            match has_passed {
                Ok(()) => {}
                Err(driver::DriverError(cuda_sys::CUresult::CUDA_ERROR_NOT_READY)) => {
                    if since.elapsed() > PATIENCE {
                        self.member.time_out(op.clone(), sequence, PATIENCE.as_secs());
                    }
                    *mark = Some(Mark { since, op, sequence });
                }
                Err(error) => self.member.fail(&format!("the GPU has failed: {error}")),
            }
        }
    }

    /// Ends the communicator: its kernels stop wherever they are. May wait for as long as NCCL needs.
    pub(crate) fn abort(&self) {
        self.end(nccl::comm_abort);
    }

    /// Ends the communicator once its operations have ended. Waits for the other members to do the same.
    pub(crate) fn destroy(&self) {
        // The rank may have ended before the device's thread has run what it queued, which the peers wait for.
        while self.queued.load(Ordering::Acquire) > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.end(nccl::comm_destroy);
    }

    /// Whether nobody has ended it yet.
    pub(crate) fn is_live(&self) -> bool {
        !self.has_ended.load(Ordering::Acquire)
    }

    /// Whether its end is over.
    pub(crate) fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Acquire)
    }

    fn end(&self, how: unsafe fn(nccl_sys::ncclComm_t) -> Result<nccl::NcclStatus, nccl::NcclError>) {
        if self.has_ended.swap(true, Ordering::AcqRel) {
            return;
        }
        // No call begins from here on. One under way may itself wait for a peer that is gone, in the set-up of a first
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
        // Later calls see that it has ended; they need not wait for the end.
        drop(calls);
        // SAFETY: this is the only end of the communicator. An error of its end is no error of the run.
        unsafe {
            let _ = driver::ctx::set_current(self.context as _);
            let _ = how(self.comm as _);
        }
        ledger::remove(ledger::Kind::Communicator, self.taken.0, self.taken.1);
        self.is_gone.store(true, Ordering::Release);
    }

    fn lock(&self) -> MutexGuard<'_, Option<Mark>> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if !self.is_gone() {
            return;
        }
        // SAFETY: nothing is queued or waited for any more that knows of them; the driver lets the last work end. What
        // cannot be destroyed is a small leak, no error of the run.
        unsafe {
            let _ = driver::stream::destroy(self.stream as _);
            for event in [self.inputs_ready, self.done, self.progress] {
                let _ = driver::event::destroy(event as _);
            }
        }
    }
}

impl Call<'_> {
    /// The arguments of an NCCL operation.
    pub(crate) fn target(self) -> (nccl_sys::ncclComm_t, nccl_sys::cudaStream_t) {
        (self.link.comm as _, self.link.stream as _)
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
fn stamp(event: usize, stream: cuda_sys::CUstream) -> Result<(), String> {
    // SAFETY: whoever reads the event destroys it after that, and the caller's stream is live.
    unsafe { driver::event::record(event as _, stream) }.map_err(|error| error.to_string())
}

fn panic_text(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "panicked without a message".into())
}
