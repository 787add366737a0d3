//! When a GPU did what: stamps on the compute stream, and the times of the collectives that run beside it.
//!
//! The host only queues events and reads them later. Everything belongs to the rank's thread.

use crate::cuda;
use crate::nccl::gpu_of;
use burn::backend::Cube;
use burn::tensor::{DType, Device, Tensor};
use burn_cubecl::tensor::CubeTensor;
use cudarc::driver::{DriverError, result as driver, sys};
use std::cell::RefCell;
use std::time::Instant;

thread_local! {
    /// Events around the collectives of this thread, while a timeline is on.
    static EXCHANGES: RefCell<Option<Vec<Exchange>>> = const { RefCell::new(None) };
}

/// Events around a collective, as integers so that they can cross threads.
#[derive(Clone, Copy)]
struct Exchange {
    gathers: bool,
    events: [usize; 2],
}

/// What ran beside the compute stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exchanged {
    /// An all-gather, else a sum.
    pub gathers: bool,
    /// Nanoseconds since the origin.
    pub start: u64,
    /// Nanoseconds since the origin.
    pub end: u64,
}

/// Stamps of the compute stream of one rank.
pub struct Timeline {
    anchor: CubeTensor,
    gpu: usize,
    base: usize,
    /// Nanoseconds from the origin to `base`.
    base_time: u64,
    stamps: Vec<usize>,
}

impl Timeline {
    /// A timeline whose times count from `origin`; waits for the GPU. `None` for other devices.
    ///
    /// # Panics
    /// If the GPU has failed.
    pub fn start(device: &Device, origin: Instant) -> Option<Self> {
        let anchor = Tensor::<1>::empty([1], (device, DType::F32)).try_into_primitive::<Cube>().ok()?;
        let gpu = gpu_of(&anchor.device)?;
        enter(gpu);
        let mut timeline = Self { anchor, gpu, base: event(), base_time: 0, stamps: Vec::new() };
        timeline.sync();
        timeline.base_time = origin.elapsed().as_nanos() as u64;
        timeline.record(timeline.base);
        cuda::flush(&timeline.anchor);
        EXCHANGES.set(Some(Vec::new()));
        Some(timeline)
    }

    /// Notes when the compute stream comes here; a number for [`Timeline::read`].
    pub fn stamp(&mut self) -> usize {
        let event = event();
        self.record(event);
        self.stamps.push(event);
        self.stamps.len() - 1
    }

    /// Waits for the compute stream. The time of each stamp since the last call, in nanoseconds since the origin, and the
    /// collectives that have ended; others are for a later call.
    ///
    /// # Panics
    /// If the GPU has failed.
    pub fn read(&mut self) -> (Vec<u64>, Vec<Exchanged>) {
        self.sync();
        enter(self.gpu);
        let stamps = std::mem::take(&mut self.stamps);
        let times = stamps.iter().map(|&event| self.time(event)).collect();
        stamps.into_iter().for_each(destroy);
        let all = EXCHANGES.with_borrow_mut(|list| list.as_mut().map(std::mem::take)).unwrap_or_default();
        let (ended, running): (Vec<_>, Vec<_>) = all.into_iter().partition(|exchange| has_ended(exchange.events[1]));
        EXCHANGES.with_borrow_mut(|list| list.as_mut().map(|list| list.extend(running)));
        let exchanged = ended.into_iter().map(|Exchange { gathers, events }| {
            let [start, end] = events.map(|event| self.time(event));
            events.into_iter().for_each(destroy);
            Exchanged { gathers, start, end }
        });
        (times, exchanged.collect())
    }

    fn time(&self, event: usize) -> u64 {
        // SAFETY: both events were recorded, and the caller has seen to it that they have passed.
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

    /// Waits until the device's thread has run what was queued and the compute stream has come to its end.
    fn sync(&self) {
        cubecl::future::block_on(self.anchor.client.sync())
            .unwrap_or_else(|error| panic!("GPU {}: waiting for the timeline: {error:?}", self.gpu));
    }
}

impl Drop for Timeline {
    fn drop(&mut self) {
        // The events of collectives in flight are a small leak.
        EXCHANGES.set(None);
    }
}

/// Events to record right before and after a collective; `None` while no timeline is on.
pub(crate) fn exchange(gathers: bool) -> Option<[usize; 2]> {
    EXCHANGES.with_borrow_mut(|list| {
        let list = list.as_mut()?;
        let events = [event(), event()];
        list.push(Exchange { gathers, events });
        Some(events)
    })
}

fn event() -> usize {
    ok(driver::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)) as usize
}

fn destroy(event: usize) {
    // SAFETY: it has passed, and nobody keeps it.
    ok(unsafe { driver::event::destroy(event as _) });
}

fn has_ended(event: usize) -> bool {
    // SAFETY: the device's thread has recorded it.
    unsafe { driver::event::query(event as _) }.is_ok()
}

/// Makes the GPU's context current on this thread.
pub(crate) fn enter(gpu: usize) {
    // SAFETY: it is the primary context, which CubeCL retains for the life of the process.
    ok(unsafe { driver::primary_ctx::retain(gpu as i32).and_then(|context| driver::ctx::set_current(context)) });
}

fn ok<T>(result: Result<T, DriverError>) -> T {
    result.unwrap_or_else(|error| panic!("the GPU's timeline: {error}"))
}
