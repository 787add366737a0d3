//! GPU timelines: time stamps on the compute stream, the times of the collectives that overlap it, and the times in
//! which it waited for one.
//!
//! The host only queues events and reads them later. Collectives and waits are recorded on CubeCL's thread, for each
//! compute stream whose timeline is on.

use crate::comm::DeviceOpKind;
use crate::nccl::gpu_of;
use burn::backend::Cube;
use burn::tensor::{DType, Device, Tensor};
use burn_cubecl::tensor::CubeTensor;
use cudarc::driver::{DriverError, result as driver, sys};
use gpu::cuda;
use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// The records of one compute stream.
struct Notes {
    compute: usize,
    collectives: Vec<Collective>,
    /// Events around the waits of the compute stream.
    stalls: Vec<[usize; 2]>,
}

/// Events around a collective, as integers because they cross threads.
struct Collective {
    kind: CollectiveKind,
    group: String,
    events: [usize; 2],
}

/// The timelines that are on.
static NOTES: Mutex<Vec<Notes>> = Mutex::new(Vec::new());
/// Their number, so that no lock is taken if there is none.
static ON: AtomicUsize = AtomicUsize::new(0);

/// The kind of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CollectiveKind {
    /// All ranks get all shards.
    AllGather,
    /// Each rank gets its shard of the sum.
    ReduceScatter,
    /// All ranks get the sum.
    AllReduce,
    /// To a neighbour.
    Send,
    /// From a neighbour, including the wait for it.
    Receive,
    /// Broadcasts, reductions to one rank and all-to-alls.
    Other,
}

impl CollectiveKind {
    /// The kind of an operation for `member` of its group.
    pub(crate) fn of(kind: &DeviceOpKind, member: usize) -> Self {
        match kind {
            DeviceOpKind::AllGather(_) => Self::AllGather,
            DeviceOpKind::ReduceScatter(_) => Self::ReduceScatter,
            DeviceOpKind::AllReduce(_) => Self::AllReduce,
            DeviceOpKind::Message if member == 0 => Self::Send,
            DeviceOpKind::Message => Self::Receive,
            _ => Self::Other,
        }
    }
}

/// A collective that overlapped the compute stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimedCollective {
    /// The kind.
    pub kind: CollectiveKind,
    /// Name of the group, [`Group::name`](crate::comm::Group::name).
    pub group: String,
    /// Nanoseconds since the origin, when inputs were ready and the group's stream reached it.
    pub start: u64,
    /// Nanoseconds since the origin.
    pub end: u64,
}

/// The new records of a timeline.
#[derive(Clone, Debug, Default)]
pub struct Read {
    /// The time of each stamp, in nanoseconds since the origin.
    pub stamps: Vec<u64>,
    /// Collectives that have ended; others are for a later call.
    pub collectives: Vec<TimedCollective>,
    /// Start and end of each wait of the compute stream for a collective.
    pub stalls: Vec<[u64; 2]>,
}

/// The timeline of one rank's compute stream.
pub struct Timeline {
    anchor: CubeTensor,
    gpu: usize,
    /// The compute stream.
    compute: usize,
    base: usize,
    /// Nanoseconds from the origin to `base`.
    base_time: u64,
    stamps: Vec<usize>,
}

impl Timeline {
    /// A timeline with times relative to `origin`; waits for the GPU. `None` for other devices.
    ///
    /// # Panics
    /// If the GPU has failed.
    pub fn start(device: &Device, origin: Instant) -> Option<Self> {
        let anchor = Tensor::<1>::empty([1], (device, DType::F32)).try_into_primitive::<Cube>().ok()?;
        let gpu = gpu_of(&anchor.device)?;
        ok(cuda::enter(gpu));
        let mut timeline = Self { anchor, gpu, compute: 0, base: event(), base_time: 0, stamps: Vec::new() };
        let stream = Arc::new(AtomicUsize::new(0));
        let found = stream.clone();
        let find = move |_: [_; 1], compute| {
            found.store(compute as usize, Ordering::Release);
            Ok(())
        };
        cuda::submit([&timeline.anchor], find, |message| panic!("the stream of the GPU's timeline: {message}"));
        timeline.sync();
        timeline.compute = stream.load(Ordering::Acquire);
        timeline.base_time = origin.elapsed().as_nanos() as u64;
        timeline.record(timeline.base);
        cuda::flush(&timeline.anchor);
        lock().push(Notes { compute: timeline.compute, collectives: Vec::new(), stalls: Vec::new() });
        ON.fetch_add(1, Ordering::Release);
        Some(timeline)
    }

    /// Records the time when the compute stream reaches this point; returns an index into [`Read::stamps`].
    pub fn stamp(&mut self) -> usize {
        let event = event();
        self.record(event);
        self.stamps.push(event);
        self.stamps.len() - 1
    }

    /// Waits for the compute stream; returns everything new since the last call.
    ///
    /// # Panics
    /// If the GPU has failed.
    pub fn read(&mut self) -> Read {
        self.sync();
        ok(cuda::enter(self.gpu));
        let stamps = std::mem::take(&mut self.stamps);
        let (ended, stalls) = self.ended();
        let times = |events: [usize; 2]| events.map(|event| self.time(event));
        let read = Read {
            stamps: stamps.iter().map(|&event| self.time(event)).collect(),
            stalls: stalls.iter().map(|&events| times(events)).collect(),
            collectives: ended.iter().map(|collective| collective.read(times(collective.events))).collect(),
        };
        let events = ended.iter().map(|collective| collective.events).chain(stalls);
        stamps.into_iter().chain(events.flatten()).for_each(destroy);
        read
    }

    /// Removes the collectives that have ended, and all waits of the compute stream, whose work is done.
    fn ended(&self) -> (Vec<Collective>, Vec<[usize; 2]>) {
        let mut all = lock();
        let Some(notes) = all.iter_mut().find(|notes| notes.compute == self.compute) else { return Default::default() };
        let (ended, running) =
            std::mem::take(&mut notes.collectives).into_iter().partition(|collective| has_ended(collective.events[1]));
        notes.collectives = running;
        (ended, std::mem::take(&mut notes.stalls))
    }

    fn time(&self, event: usize) -> u64 {
        // SAFETY: both events were recorded, and the caller has ensured that they have passed.
        let milliseconds = unsafe { driver::event::elapsed(self.base as _, event as _) };
        self.base_time + (f64::from(ok(milliseconds)).max(0.0) * 1e6) as u64
    }

    fn record(&self, event: usize) {
        let record = move |_: [_; 1], compute| {
            // SAFETY: events live until they have been read, which waits for the stream.
            unsafe { driver::event::record(event as _, compute) }.map_err(|error| error.to_string())
        };
        cuda::submit([&self.anchor], record, |message| panic!("a stamp of the GPU's timeline: {message}"));
    }

    /// Waits until the device's thread has run its queued calls and the compute stream has finished its work.
    fn sync(&self) {
        cubecl::future::block_on(self.anchor.client.sync())
            .unwrap_or_else(|error| panic!("GPU {}: waiting for the timeline: {error:?}", self.gpu));
    }
}

impl Drop for Timeline {
    fn drop(&mut self) {
        // The events of collectives in flight are a small leak.
        lock().retain(|notes| notes.compute != self.compute);
        ON.fetch_sub(1, Ordering::Release);
    }
}

impl Collective {
    fn read(&self, [start, end]: [u64; 2]) -> TimedCollective {
        TimedCollective { kind: self.kind, group: self.group.clone(), start, end: end.max(start) }
    }
}

/// Events to record right before and after a collective; `None` if this compute stream has no timeline.
pub(crate) fn collective(compute: sys::CUstream, kind: CollectiveKind, group: &str) -> Option<[usize; 2]> {
    note(compute, |notes, events| notes.collectives.push(Collective { kind, group: group.to_string(), events }))
}

/// Events to record right before and after the compute stream waits; `None` if it has no timeline.
pub(crate) fn stall(compute: sys::CUstream) -> Option<[usize; 2]> {
    note(compute, |notes, events| notes.stalls.push(events))
}

fn note(compute: sys::CUstream, push: impl FnOnce(&mut Notes, [usize; 2])) -> Option<[usize; 2]> {
    if ON.load(Ordering::Acquire) == 0 {
        return None;
    }
    let mut all = lock();
    let notes = all.iter_mut().find(|notes| notes.compute == compute as usize)?;
    let events = [event(), event()];
    push(notes, events);
    Some(events)
}

fn lock() -> MutexGuard<'static, Vec<Notes>> {
    NOTES.lock()
}

fn event() -> usize {
    ok(driver::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)) as usize
}

fn destroy(event: usize) {
    // SAFETY: it has passed, and there is no other reference to it.
    ok(unsafe { driver::event::destroy(event as _) });
}

fn has_ended(event: usize) -> bool {
    // SAFETY: the device's thread has recorded it.
    unsafe { driver::event::query(event as _) }.is_ok()
}

fn ok<T>(result: Result<T, DriverError>) -> T {
    result.unwrap_or_else(|error| panic!("the GPU's timeline: {error}"))
}
