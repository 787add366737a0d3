//! One rank's communicator of a group, with a separate stream.
//!
//! Invariants:
//! - All calls for a communicator come from the device's thread in CubeCL, in the rank's order of operations, under
//!   `calls`. Only the watchdog, which blocks nobody, and the end of the run come from elsewhere.
//! - `cuStreamWaitEvent` waits for the last record of the event *at the time of the call*. `inputs_ready` and `done`
//!   are recorded and waited for within one call of the device's thread, so one of each is enough. An operation that is
//!   waited for later has its own event from `events`, from before its record until after its wait.
//!
//! `call` is the context of an operation, `end` the watchdog of the communicator and its end.

mod call;
mod end;

pub(super) use call::Call;
use call::stamp;

use super::copies::DmaCopies;
use super::events::Events;
use super::join;
use crate::comm::watched::Watched;
use crate::comm::{DeviceLink, DeviceOp, Group, Member};
use crate::one_shot::OneShot;
use crate::startup::{Phase, phase};
use crate::timeline::{self, CollectiveKind};
use burn_cubecl::tensor::CubeTensor;
use cudarc::driver::{result as driver, sys as cuda_sys};
use gpu::cuda;
use gpu::memory_use::ledger;
use parking_lot::{Mutex, MutexGuard};
use std::any::Any;
use std::ffi::c_void;
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// Raw handles are stored as integers, because they cross threads.
pub struct Communicator {
    member: Member,
    /// This rank's index among the members, and the group's name.
    place: (usize, String),
    context: usize,
    comm: usize,
    stream: usize,
    inputs_ready: usize,
    done: usize,
    progress: usize,
    pub(crate) events: Events,
    /// `None` if members have no access to each other's memory.
    copies: OnceLock<Option<DmaCopies>>,
    /// `None` if NCCL does the sums of small tensors too.
    one_shot: OnceLock<Option<OneShot>>,
    calls: Mutex<Watched<Mark>>,
    /// The operation that a call is queuing now. If NCCL has to connect to the peers first, it waits for them there.
    entered: Mutex<Option<Mark>>,
    /// Calls that the device's thread has not run yet.
    queued: AtomicUsize,
    has_ended: AtomicBool,
    is_gone: AtomicBool,
    /// The GPU, and the bytes that were allocated on it when the communicator was created.
    taken: (usize, u64),
}

/// An operation that was or is being queued, and its time.
#[derive(Clone)]
struct Mark {
    since: Instant,
    op: DeviceOp,
    sequence: u64,
    /// The CUDA stream that it is queued on.
    stream: usize,
}

/// A queued call; it is counted until it has run or is dropped.
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

impl Call<'_> {
    /// This member's state of collectives by DMA copy engines, if it was set up.
    pub(crate) fn copies(&self) -> Option<&DmaCopies> {
        self.link.copies.get()?.as_ref()
    }

    /// This member's side of one-shot all-reduces, if it was set up.
    pub(crate) fn one_shot(&self) -> Option<&OneShot> {
        self.link.existing_one_shot()
    }
}

impl Communicator {
    /// Joins the communicator of `group`; every member must call this, from the rank's thread. Its kernels have at most
    /// `blocks` thread blocks, or NCCL's default.
    ///
    /// # Errors
    /// Without NCCL, with different versions of it, and NCCL's errors.
    pub(crate) fn join(group: &Group, device: usize, blocks: Option<i32>) -> Result<Arc<Self>, String> {
        phase(Phase::Connect, || Self::joined(group, device, blocks))
    }

    fn joined(group: &Group, device: usize, blocks: Option<i32>) -> Result<Arc<Self>, String> {
        let id = join::agree(group)?;
        group.share_recorder();
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
        // The highest priority: work that waits for peers should start before work that does not.
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
            copies: OnceLock::new(),
            one_shot: OnceLock::new(),
            calls: Mutex::new(Watched::new()),
            entered: Mutex::new(None),
            queued: AtomicUsize::new(0),
            has_ended: AtomicBool::new(false),
            is_gone: AtomicBool::new(false),
            taken,
        }))
    }

    /// This member's state of collectives by DMA copy engines, if `group`, whose communicator this is, supports them.
    /// The first call is a collective.
    pub(crate) fn copies(&self, group: &Group) -> Option<&DmaCopies> {
        self.copies.get_or_init(|| DmaCopies::join(group, self.taken.0)).as_ref()
    }

    /// This member's side of one-shot all-reduces, if all members of `group`, whose communicator this is, can take part.
    /// The first call is a collective.
    pub(crate) fn one_shot(&self, group: &Group) -> Option<&OneShot> {
        let join = || {
            let joined = OneShot::join(group, self.taken.0, self.context, self.stream);
            if let (Err(why), 0) = (&joined, group.rank()) {
                let (name, ranks) = (group.name(), group.ranks());
                let _ = writeln!(io::stderr(), "NCCL sums small tensors of {name}{ranks:?} too: {why}");
            }
            joined.ok()
        };
        self.one_shot.get_or_init(join).as_ref()
    }

    /// The same, if it was set up.
    pub(crate) fn existing_one_shot(&self) -> Option<&OneShot> {
        self.one_shot.get()?.as_ref()
    }

    /// Runs `work(call, buffers)` on the device's thread, which queues operation `op` with number `sequence` on the
    /// communicator's stream; an error or a panic in it ends the run. `work` does not run if the communicator has
    /// ended.
    pub(crate) fn queue<const N: usize>(
        self: &Arc<Self>,
        operation: (u64, DeviceOp),
        tensors: [&CubeTensor; N],
        work: impl FnOnce(Call, [*mut c_void; N]) -> Result<(), String> + Send + 'static,
    ) {
        self.queue_all(operation, &tensors, move |call, buffers| work(call, std::array::from_fn(|i| buffers[i])));
    }

    /// [`queue`](Self::queue) with any number of tensors, but with one at least.
    pub(crate) fn queue_all(
        self: &Arc<Self>,
        operation: (u64, DeviceOp),
        tensors: &[&CubeTensor],
        work: impl FnOnce(Call, Vec<*mut c_void>) -> Result<(), String> + Send + 'static,
    ) {
        self.queue_on(|call| call.link.stream as _, operation, tensors, work);
    }

    /// The same on another stream of this GPU.
    pub(crate) fn queue_on(
        self: &Arc<Self>,
        stream: fn(Call) -> cuda_sys::CUstream,
        (sequence, op): (u64, DeviceOp),
        tensors: &[&CubeTensor],
        work: impl FnOnce(Call, Vec<*mut c_void>) -> Result<(), String> + Send + 'static,
    ) {
        self.submit_all(tensors, move |call, buffers| {
            let mut watched = call.link.lock();
            if !call.link.is_live() {
                return Err("the communicator has ended".into());
            }
            let (member, group) = &call.link.place;
            if call.is_recorded()? {
                return work(call, buffers);
            }
            let stream = stream(call);
            let times = timeline::collective(call.compute, CollectiveKind::of(op.kind(), *member), group);
            let begin = times.map(|[begin, _]| begin);
            begin.map_or(Ok(()), |event| stamp(event, stream))?;
            let now = Mark { since: Instant::now(), op, sequence, stream: stream as usize };
            *call.link.entering() = Some(now.clone());
            let done = work(Call { begin, ..call }, buffers);
            *call.link.entering() = None;
            done?;
            times.map_or(Ok(()), |[_, end]| stamp(end, stream))?;
            watched.note(now, |_| stamp(call.link.progress, stream))
        });
    }

    /// Runs `work(call, buffers)`, which does not call NCCL, on the device's thread.
    pub(crate) fn submit<const N: usize>(
        self: &Arc<Self>,
        tensors: [&CubeTensor; N],
        work: impl FnOnce(Call, [*mut c_void; N]) -> Result<(), String> + Send + 'static,
    ) {
        self.submit_all(&tensors, move |call, buffers| work(call, std::array::from_fn(|i| buffers[i])));
    }

    fn submit_all(
        self: &Arc<Self>,
        tensors: &[&CubeTensor],
        work: impl FnOnce(Call, Vec<*mut c_void>) -> Result<(), String> + Send + 'static,
    ) {
        let (queued, failed) = (Queued::new(self), self.clone());
        // The communication stream is another one: nobody writes to the buffers in place before its work is queued.
        let held: Vec<_> = tensors.iter().map(|tensor| tensor.handle.clone()).collect();
        let work = move |buffers, compute| {
            let _held = held;
            // CubeCL would only log a panic, and the peers would wait forever.
            let call = Call { link: &queued.0, compute, begin: None };
            catch_unwind(AssertUnwindSafe(|| work(call, buffers))).unwrap_or_else(|payload| Err(panic_text(&*payload)))
        };
        let index = usize::from(tensors[0].client.service_id().device.index_id);
        cuda::submit_all(tensors, work, move |message| {
            failed.member.fail(&gpu::out_of_memory_on(index, &message).unwrap_or(message));
        });
        cuda::flush(tensors[0]);
    }

    fn lock(&self) -> MutexGuard<'_, Watched<Mark>> {
        self.calls.lock()
    }

    fn entering(&self) -> MutexGuard<'_, Option<Mark>> {
        self.entered.lock()
    }
}

fn panic_text(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "panicked without a message".into())
}
