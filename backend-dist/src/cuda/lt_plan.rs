//! cuBLASLt's handles, workspaces and plans, one set for each device and stream. A plan is what is known of one kind of
//! product: its descriptors (`plan`), the algorithms that the library suggests (`heuristic`), the quickest of them
//! (`tune`).
//!
//! Everything here runs on CubeCL's thread of the device.

mod heuristic;
mod kinds;
mod plan;
mod tune;

use std::cell::RefCell;
use std::collections::hash_map::{Entry, HashMap};
use std::ffi::c_void;

use cubecl_common::device::DeviceId;
use cudarc::cublaslt::{result, sys};
use cudarc::driver::result as driver;
use cudarc::driver::sys::{CUdeviceptr, CUstream};

use super::watch::planning;
use crate::column_major::{Problem, alignment};
use crate::gpu::memory_use::ledger;
use kinds::Kinds;
pub(crate) use kinds::{Onto, Sums};
pub(super) use kinds::{fp8_kinds, kinds};
use plan::{Plan, name};
pub(crate) use tune::tune_products;

/// Bytes of scratch memory that an algorithm may use. NVIDIA recommends at least 32 MiB on Hopper.
const WORKSPACE: usize = 64 << 20;
/// Plans kept for a stream. Lengths that change with every call (text generation) would fill memory otherwise.
const MOST_PLANS: usize = 4096;

/// Pointers that stand in the descriptor, and what else is no part of the product.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Extras {
    /// Added to every row of the result: an element of its type for each column.
    pub bias: Option<*mut c_void>,
    /// Of an FP8 product: f32 factors of `a` and of `b`.
    pub scales: Option<[*mut c_void; 2]>,
    /// No time is spent on finding the quickest algorithm.
    pub untuned: bool,
}

/// What decides which algorithms can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    problem: Problem,
    kinds: Kinds,
    onto: Onto,
    /// Whether a bias is added.
    bias: bool,
    /// Of FP8 operands, which have scales.
    sums: Option<Sums>,
    /// Of `a`, `b` and the result, in bytes.
    alignments: [u32; 3],
}

impl Key {
    pub fn new(
        problem: Problem,
        kinds: Kinds,
        onto: Onto,
        bias: bool,
        sums: Option<Sums>,
        pointers: [*mut c_void; 3],
    ) -> Self {
        let alignments = pointers.map(|pointer| alignment(pointer as usize));
        Self { problem, kinds, onto, bias, sums, alignments }
    }
}

/// The library's state for one stream. Lives as long as the process.
struct Stream {
    handle: sys::cublasLtHandle_t,
    workspace: CUdeviceptr,
    plans: HashMap<Key, Plan>,
}

thread_local! {
    // Ranks that share a GPU have streams of their own; products at the same time must not share a workspace.
    static STREAMS: RefCell<HashMap<(DeviceId, usize), Stream>> = RefCell::new(HashMap::new());
}

/// Queues the product of `pointers` `[a, b, result]`, with a bias added, on `stream`.
///
/// # Safety
///
/// The pointers must hold the operands of the key's problem, the extras, given if the key says so, what [`Extras`]
/// says, and `stream` must be one of the device whose context is current.
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
                let (handle, workspace) = (state.handle, state.workspace);
                let planned = || -> Result<Plan, String> {
                    let mut plan = Plan::new(handle, &key, extras)?;
                    if !extras.untuned {
                        // SAFETY: as promised by the caller; what this leaves in a result is replaced by the launch.
                        unsafe { tune::tune(&mut plan, &key, (handle, workspace), pointers, stream) };
                    }
                    Ok(plan)
                };
                entry.insert(planning(planned)?)
            }
        };
        plan.set(extras)?;
        // SAFETY: as promised by the caller; the workspace belongs to this stream alone.
        unsafe { plan.launch(state.handle, state.workspace, pointers, stream) }
    })
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
