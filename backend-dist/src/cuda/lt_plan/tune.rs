//! The fastest of cuBLASLt's suggestions for a product, by measurement, the same in all ranks and in later runs.
//!
//! The host waits for the compute stream while it measures, as a CPU rank waits for its operands: in the order in which
//! this rank issues work, nothing that it has not issued yet is needed to get there.

use std::ffi::c_void;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use cudarc::cublaslt::sys;
use cudarc::driver::result as driver;
use cudarc::driver::sys::{self as driver_sys, CUdeviceptr, CUevent, CUevent_flags, CUstream};

use super::Key;
use super::kinds::Onto;
use super::plan::Plan;
use crate::cache;
use crate::cache::choices::Choices;
use crate::cuda::watch::from_disk;
use crate::shard::stable_hash;

/// Suggestions to choose from.
pub(super) const CANDIDATES: usize = 64;
/// Times that an algorithm is timed.
const ROUNDS: usize = 2;
/// How many are timed in rows.
const FINALISTS: usize = 4;
/// Milliseconds of such a row.
const SUSTAINED: f32 = 50.0;

static ON: AtomicBool = AtomicBool::new(false);

/// Whether products that are planned from now on are tuned.
pub(crate) fn tune_products(on: bool) {
    ON.store(on, Relaxed);
}

pub(super) fn is_on() -> bool {
    ON.load(Relaxed)
}

/// If it is wanted, puts one of the plan's algorithms first: the one that was chosen for this product on this kind of
/// GPU, or the quickest. What goes wrong leaves them as they are.
///
/// Only what the library itself suggests is ever used: a file of another version, or a damaged one, says nothing.
///
/// # Safety
/// As [`run`](super::run); the result's elements are lost if the product replaces them.
pub(super) unsafe fn tune(
    plan: &mut Plan,
    key: &Key,
    library: (sys::cublasLtHandle_t, CUdeviceptr),
    pointers: [*mut c_void; 3],
    stream: CUstream,
) {
    if !is_on() || plan.algorithms.len() < 2 {
        return;
    }
    let first = name(key).and_then(|name| match choices().get(&name).and_then(|chosen| place(plan, chosen)) {
        Some(first) => {
            from_disk();
            Ok(first)
        }
        None => {
            // SAFETY: as promised by the caller.
            let (quickest, note) = unsafe { quickest(plan, key, library, pointers, stream) }?;
            let own = id(&plan.algorithms[quickest]);
            let settled = choices().settle(&name, own, &note, |chosen| place(plan, chosen).is_some());
            Ok(place(plan, settled).unwrap_or(quickest))
        }
    });
    match first {
        Ok(first) => plan.algorithms[..=first].rotate_right(1),
        Err(error) => cache::warn(&format!("a matrix product is not tuned: {error}")),
    }
}

/// A product on this kind of GPU.
fn name(key: &Key) -> Result<String, String> {
    let mut device = 0;
    // SAFETY: the device has a place to be written to.
    let named = unsafe { driver_sys::cuCtxGetDevice(&mut device) }.result();
    let gpu =
        named.and_then(|()| driver::device::get_name(device)).map_err(|error| format!("the GPU's name: {error}"))?;
    Ok(format!("{gpu}, {key:?}"))
}

/// A name for an algorithm, which the library describes by 64 bytes.
fn id(algorithm: &sys::cublasLtMatmulAlgo_t) -> u64 {
    stable_hash(&format!("{:?}", algorithm.data))
}

fn place(plan: &Plan, chosen: u64) -> Option<usize> {
    plan.algorithms.iter().position(|algorithm| id(algorithm) == chosen)
}

/// The place of the algorithm that is quickest for these operands, and what was seen. A GPU that multiplies matrices
/// without a pause is at its power limit, where what counts is how long an algorithm takes at the clock that it leaves
/// itself: the quickest few are timed in long rows.
///
/// # Safety
/// As [`tune`].
unsafe fn quickest(
    plan: &mut Plan,
    key: &Key,
    (handle, workspace): (sys::cublasLtHandle_t, CUdeviceptr),
    [a, b, out]: [*mut c_void; 3],
    stream: CUstream,
) -> Result<(usize, String), String> {
    let watch = Stopwatch::new(stream)?;
    // What is added to must not be added to more than once.
    let elements = key.problem.batches * key.problem.out.rows * key.problem.out.columns;
    let scratch =
        (key.onto == Onto::Add).then(|| Scratch::new(elements * key.kinds.out_bytes(), stream)).transpose()?;
    let out = scratch.as_ref().map_or(out, Scratch::pointer);
    let algorithms = plan.algorithms.clone();
    // Milliseconds of one of `launches` in a row.
    let mut time = |place: usize, launches: usize| {
        plan.algorithms = vec![algorithms[place]];
        // SAFETY: as promised by the caller; the scratch memory has the result's size and is freed on this stream.
        let work = || (0..launches).try_for_each(|_| unsafe { plan.launch(handle, workspace, [a, b, out], stream) });
        watch.time(work).map_or(f32::INFINITY, |time| time / launches as f32)
    };
    // In turns, so that a change of the GPU's clock meets all.
    let mut alone = vec![f32::INFINITY; algorithms.len()];
    for round in 0..=ROUNDS {
        for (place, best) in alone.iter_mut().enumerate() {
            let time = time(place, 1);
            if round > 0 {
                *best = best.min(time);
            }
        }
    }
    let mut places: Vec<usize> = (0..alone.len()).filter(|place| alone[*place].is_finite()).collect();
    places.sort_by(|a, b| alone[*a].total_cmp(&alone[*b]));
    places.truncate(FINALISTS);
    let mut sustained = vec![0.0; places.len()];
    for _ in 0..ROUNDS {
        for (place, sum) in places.iter().zip(&mut sustained) {
            *sum += time(*place, (SUSTAINED / alone[*place]).clamp(1.0, 1000.0) as usize) / ROUNDS as f32;
        }
    }
    plan.algorithms = algorithms;
    let best = places.iter().zip(&sustained).min_by(|a, b| a.1.total_cmp(b.1)).filter(|(_, time)| time.is_finite());
    let (&place, time) = best.ok_or("no algorithm could be timed")?;
    let first = alone[0];
    let note = format!(
        "{} suggested; the first takes {first:.3} ms alone; number {} alone {:.3}, in a row {time:.3}",
        alone.len(),
        place + 1,
        alone[place]
    );
    Ok((place, note))
}

/// What was chosen before, with this version of the library.
fn choices() -> &'static Choices {
    static CHOICES: OnceLock<Choices> = OnceLock::new();
    CHOICES.get_or_init(|| {
        // SAFETY: the library is loaded, or there would be no algorithms.
        let version = unsafe { sys::cublasLtGetVersion() };
        Choices::open(cache::folder().map(|folder| folder.join(format!("products-cublaslt-{version}.txt"))))
    })
}

/// Times work on a stream; ends with the value.
struct Stopwatch {
    stream: CUstream,
    start: CUevent,
    end: CUevent,
}

impl Stopwatch {
    pub fn new(stream: CUstream) -> Result<Self, String> {
        let event = || {
            driver::event::create(CUevent_flags::CU_EVENT_DEFAULT).map_err(|error| format!("an event to time: {error}"))
        };
        Ok(Self { stream, start: event()?, end: event()? })
    }

    /// Milliseconds that what `work` queues on the stream takes; waits for it. `None` if it was not queued.
    pub fn time(&self, work: impl FnOnce() -> Result<(), String>) -> Option<f32> {
        // SAFETY: stream and events are alive, of the context that is current.
        unsafe {
            driver::event::record(self.start, self.stream).ok()?;
            work().ok()?;
            driver::event::record(self.end, self.stream).ok()?;
            driver::event::synchronize(self.end).ok()?;
            driver::event::elapsed(self.start, self.end).ok()
        }
    }
}

impl Drop for Stopwatch {
    fn drop(&mut self) {
        for event in [self.start, self.end] {
            // SAFETY: nobody else knows of the events.
            let _ = unsafe { driver::event::destroy(event) };
        }
    }
}

/// Memory on a stream for results that nobody reads.
struct Scratch {
    pointer: CUdeviceptr,
    stream: CUstream,
}

impl Scratch {
    /// `bytes` zeros.
    pub fn new(bytes: usize, stream: CUstream) -> Result<Self, String> {
        let failed = |error| format!("{bytes} bytes to tune in: {error}");
        // SAFETY: the stream is one of the context that is current; the memory is freed in its order.
        unsafe {
            let pointer = driver::malloc_async(stream, bytes).map_err(failed)?;
            let scratch = Self { pointer, stream };
            driver::memset_d8_async(pointer, 0, bytes, stream).map_err(failed)?;
            Ok(scratch)
        }
    }

    pub fn pointer(&self) -> *mut c_void {
        self.pointer as *mut c_void
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: what uses the memory was queued on the same stream before.
        let _ = unsafe { driver::free_async(self.pointer, self.stream) };
    }
}
