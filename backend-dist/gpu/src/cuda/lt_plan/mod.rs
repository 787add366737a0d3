//! cuBLASLt's handles, workspaces and plans, one set for each device and stream. A plan belongs to one kind of GEMM:
//! its descriptors (`plan`) and the algorithms that cuBLASLt suggests (`heuristic`).
//!
//! Everything here runs on CubeCL's thread of the device.

mod heuristic;
mod kinds;
mod plan;

use std::cell::RefCell;
use std::collections::hash_map::{Entry, HashMap};
use std::ffi::c_void;

use cubecl_common::device::DeviceId;
use cudarc::cublaslt::{result, sys};
use cudarc::driver::result as driver;
use cudarc::driver::sys::{CUdeviceptr, CUstream};

use super::watch::planning;
use crate::column_major::{Problem, alignment};
use crate::memory_use::ledger;
use kernels_cubecl::fp8::Granularity;
use kinds::Kinds;
pub use kinds::{Mixed, Onto, Sums};
pub(super) use kinds::{fp8_kinds, kinds};
use plan::{Plan, name};

/// Bytes of scratch memory that an algorithm may use. NVIDIA recommends at least 32 MiB on Hopper.
const WORKSPACE: usize = 64 << 20;
/// Plans cached for a stream. Sizes that change with every call (text generation) would otherwise fill the memory.
const MOST_PLANS: usize = 4096;

/// Pointers of the descriptor that are not part of the key.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Extras {
    /// Added to every row of the output: an element of its type for each column.
    pub bias: Option<*mut c_void>,
    /// Of an FP8 GEMM: f32 factors of `a` and of `b`.
    pub scales: Option<[*mut c_void; 2]>,
    /// An operand that is added, which lies as the output does.
    pub mixed: Option<Mixed>,
}

/// Everything that determines the usable algorithms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    problem: Problem,
    kinds: Kinds,
    onto: Onto,
    /// Whether a bias is added.
    bias: bool,
    /// Of FP8 operands, and which of their values share a scale.
    fp8: Option<(Sums, [Granularity; 2])>,
    /// Alignment of `a`, `b` and the output, in bytes.
    alignments: [u32; 3],
}

impl Key {
    pub fn new(
        problem: Problem,
        kinds: Kinds,
        onto: Onto,
        bias: bool,
        fp8: Option<(Sums, [Granularity; 2])>,
        pointers: [*mut c_void; 3],
    ) -> Self {
        let alignments = pointers.map(|pointer| alignment(pointer as usize));
        Self { problem, kinds, onto, bias, fp8, alignments }
    }
}

/// cuBLASLt's state for one stream, until the device's is [freed](free).
struct Stream {
    handle: sys::cublasLtHandle_t,
    workspace: CUdeviceptr,
    plans: HashMap<Key, Plan>,
}

thread_local! {
    // Ranks that share a GPU have separate streams; concurrent GEMMs must not share a workspace.
    static STREAMS: RefCell<HashMap<(DeviceId, usize), Stream>> = RefCell::new(HashMap::new());
}

/// Queues the GEMM of `pointers` `[a, b, output]` on `stream`, with a bias if the key has one.
///
/// # Safety
///
/// The pointers must be those of the key's problem, the extras must be given as [`Extras`] and the key say, and
/// `stream` must belong to the current device context.
pub(super) unsafe fn run(
    device: DeviceId,
    stream: CUstream,
    key: Key,
    pointers: [*mut c_void; 3],
    extras: Extras,
) -> Result<(), String> {
    STREAMS.with_borrow_mut(|streams| {
        let state = match streams.entry((device, stream as usize)) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(Stream::new(device)?),
        };
        if state.plans.len() >= MOST_PLANS && !state.plans.contains_key(&key) {
            state.plans.clear();
        }
        let plan = match state.plans.entry(key) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let handle = state.handle;
                entry.insert(planning(|| Plan::new(handle, &key, extras))?)
            }
        };
        plan.set(extras)?;
        // SAFETY: as promised by the caller; the workspace belongs to this stream alone.
        unsafe { plan.launch(state.handle, state.workspace, pointers, extras.mixed, stream) }
    })
}

/// Frees the state of all streams of a device, which is idle: threads that have ended do not return to theirs. A stream
/// that is used again gets a new one, but no CUDA graph with GEMMs may be left.
pub(super) fn free(device: DeviceId) {
    STREAMS.with_borrow_mut(|streams| {
        for (_, Stream { handle, workspace, plans }) in streams.extract_if(|(of, _), _| *of == device) {
            drop(plans);
            // SAFETY: no plan and no queued work uses them any more. What cannot be freed is a leak.
            unsafe {
                let _ = result::destroy_handle(handle);
                if driver::free_sync(workspace).is_ok() {
                    ledger::remove(ledger::Kind::Workspace, usize::from(device.index_id), WORKSPACE as u64);
                }
            }
        }
    });
}

impl Stream {
    fn new(device: DeviceId) -> Result<Self, String> {
        let handle = result::create_handle().map_err(|error| format!("cublasLtCreate: {}", name(error)))?;
        // SAFETY: the device's context is current on this thread.
        let workspace = unsafe { driver::malloc_sync(WORKSPACE) }
            .map_err(|error| format!("no {} MiB for cuBLASLt's workspace: {error}", WORKSPACE >> 20))?;
        ledger::add(ledger::Kind::Workspace, usize::from(device.index_id), WORKSPACE as u64);
        Ok(Self { handle, workspace, plans: HashMap::new() })
    }
}
