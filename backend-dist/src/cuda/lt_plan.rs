//! cuBLASLt's handles, workspaces, descriptors and algorithms, one set for each device and stream.
//!
//! Everything here runs on CubeCL's thread of the device.

mod tune;

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;

use burn::tensor::DType;
use cubecl_common::device::DeviceId;
use cudarc::cublaslt::{result, sys};
use cudarc::driver::result as driver;
use cudarc::driver::sys::{self as driver_sys, CUdeviceptr, CUstream};
use kernels_cubecl::fp8::Format;

use super::watch::planning;
use crate::column_major::{Problem, Stored, alignment};
use crate::gpu::memory_use::ledger;
pub(crate) use tune::tune_products;

/// Bytes of scratch memory that an algorithm may use. NVIDIA recommends at least 32 MiB on Hopper.
const WORKSPACE: usize = 64 << 20;
/// Algorithms asked for; the first that runs is kept.
const CANDIDATES: usize = 8;
const _: () = assert!(CANDIDATES <= tune::CANDIDATES);
/// Plans kept for a stream. Lengths that change with every call (text generation) would fill memory otherwise.
const MOST_PLANS: usize = 4096;

/// What happens to the elements of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Onto {
    /// They are written.
    Replace,
    /// The product is added to them.
    Add,
}

/// Element types of a product, as the library names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Kinds {
    a: sys::cudaDataType,
    b: sys::cudaDataType,
    out: sys::cudaDataType,
}

impl Kinds {
    /// Bytes of an element of the result.
    fn out_bytes(self) -> usize {
        match self.out {
            sys::cudaDataType::CUDA_R_64F => 8,
            sys::cudaDataType::CUDA_R_32F => 4,
            _ => 2,
        }
    }
}

/// The types of `a · b`, if they are among those that the crate uses.
pub(super) fn kinds(a: DType, b: DType, out: DType) -> Option<Kinds> {
    let kind = |dtype| match dtype {
        DType::BF16 => Some(sys::cudaDataType::CUDA_R_16BF),
        DType::F16 => Some(sys::cudaDataType::CUDA_R_16F),
        DType::F32 | DType::Flex32 => Some(sys::cudaDataType::CUDA_R_32F),
        DType::F64 => Some(sys::cudaDataType::CUDA_R_64F),
        _ => None,
    };
    let (input, out) = (kind(a)?, kind(out)?);
    let half = matches!(a, DType::BF16 | DType::F16);
    let widened = half && out == sys::cudaDataType::CUDA_R_32F;
    (kind(b)? == input && (out == input || widened)).then_some(Kinds { a: input, b: input, out })
}

/// The types of a product of FP8 operands with a result of type `out`, if the library has it: not both e5m2, and a result
/// of 16 or 32 bits.
pub(super) fn fp8_kinds(a: Format, b: Format, out: DType) -> Option<Kinds> {
    let kind = |format| match format {
        Format::E4m3 => sys::cudaDataType::CUDA_R_8F_E4M3,
        Format::E5m2 => sys::cudaDataType::CUDA_R_8F_E5M2,
    };
    let out = match out {
        DType::BF16 => sys::cudaDataType::CUDA_R_16BF,
        DType::F16 => sys::cudaDataType::CUDA_R_16F,
        DType::F32 => sys::cudaDataType::CUDA_R_32F,
        _ => return None,
    };
    let both = a == Format::E5m2 && b == Format::E5m2;
    (!both).then_some(Kinds { a: kind(a), b: kind(b), out })
}

/// How an FP8 product is summed up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Sums {
    /// In the tensor core's own accumulator, which has fewer bits than f32.
    Fast,
    /// In f32, to which the tensor core's sums are added every few steps.
    Exact,
}

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
/// The pointers must hold the operands of the key's problem, the extras, given if the key says so, what [`Extras`] says,
/// and `stream` must be one of the device whose context is current.
pub(super) unsafe fn run(
    device: DeviceId,
    stream: CUstream,
    key: Key,
    pointers: [*mut c_void; 3],
    extras: Extras,
) -> Result<(), String> {
    STREAMS.with_borrow_mut(|streams| {
        let state = match streams.entry((device, stream as usize)) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => entry.insert(Stream::new(device)?),
        };
        if state.plans.len() >= MOST_PLANS && !state.plans.contains_key(&key) {
            state.plans.clear();
        }
        let plan = match state.plans.entry(key) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => {
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

/// Descriptors of one kind of product, and the algorithms that may compute it, the best first.
struct Plan {
    operation: sys::cublasLtMatmulDesc_t,
    first: sys::cublasLtMatrixLayout_t,
    second: sys::cublasLtMatrixLayout_t,
    out: sys::cublasLtMatrixLayout_t,
    algorithms: Vec<sys::cublasLtMatmulAlgo_t>,
    onto: Onto,
    double: bool,
}

impl Plan {
    fn new(handle: sys::cublasLtHandle_t, key: &Key, extras: Extras) -> Result<Self, String> {
        let Key { problem, kinds, onto, bias, sums, alignments } = *key;
        let double = kinds.a == sys::cudaDataType::CUDA_R_64F;
        let (compute, scale) = if double {
            (sys::cublasComputeType_t::CUBLAS_COMPUTE_64F, sys::cudaDataType::CUDA_R_64F)
        } else {
            (sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, sys::cudaDataType::CUDA_R_32F)
        };
        let failed = |what: &'static str| move |error| format!("{what}: {}", name(error));
        let mut plan = Self {
            operation: result::create_matmul_desc(compute, scale).map_err(failed("cublasLtMatmulDescCreate"))?,
            first: std::ptr::null_mut(),
            second: std::ptr::null_mut(),
            out: std::ptr::null_mut(),
            algorithms: Vec::new(),
            onto,
            double,
        };
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        for (attribute, operand) in [
            (Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &problem.first),
            (Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &problem.second),
        ] {
            // SAFETY: both attributes are 32-bit integers (`cublasOperation_t`).
            unsafe { plan.describe(attribute, i32::from(operand.transposed)) }?;
        }
        if bias {
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32;
            // SAFETY: both attributes are 32-bit integers.
            unsafe {
                plan.describe(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue)?;
                plan.describe(Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, kinds.out as i32)?;
            }
        }
        if let Some(sums) = sums {
            // SAFETY: the attribute is an 8-bit integer.
            unsafe { plan.describe(Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, i8::from(sums == Sums::Fast)) }?;
        }
        plan.set(extras)?;
        plan.first = layout(&problem.first, kinds.b, problem.batches)?;
        plan.second = layout(&problem.second, kinds.a, problem.batches)?;
        plan.out = layout(&problem.out, kinds.out, problem.batches)?;
        if problem.left > 0 {
            let target = processors()?.saturating_sub(problem.left as i32).max(1);
            // SAFETY: the attribute is a 32-bit integer.
            unsafe { plan.describe(Attribute::CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, target) }?;
        }
        plan.algorithms = plan.heuristic(handle, alignments)?;
        Ok(plan)
    }

    /// The pointers of the next launch. The descriptor is read when a product is queued, so plans serve many biases and
    /// scales.
    fn set(&self, extras: Extras) -> Result<(), String> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let scales = extras.scales.map(|[a, b]| {
            // As `Problem` says, `b` is the library's first operand.
            [(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, b), (Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, a)]
        });
        let bias = extras.bias.map(|bias| (Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias));
        for (attribute, pointer) in scales.into_iter().flatten().chain(bias) {
            // SAFETY: the attributes are pointers.
            unsafe { self.describe(attribute, pointer) }?;
        }
        Ok(())
    }

    /// Sets an attribute of the descriptor.
    ///
    /// # Safety
    ///
    /// The attribute must have the type of `value`.
    unsafe fn describe<T>(&self, attribute: sys::cublasLtMatmulDescAttributes_t, value: T) -> Result<(), String> {
        // SAFETY: the descriptor is alive; the caller vouches for the size.
        unsafe { result::set_matmul_desc_attribute(self.operation, attribute, bytes(&value), size_of::<T>()) }
            .map_err(|error| format!("cublasLtMatmulDescSetAttribute ({attribute:?}): {}", name(error)))
    }

    /// The library's suggestions for pointers aligned to `[a, b, result]` bytes.
    fn heuristic(
        &self,
        handle: sys::cublasLtHandle_t,
        [a, b, out]: [u32; 3],
    ) -> Result<Vec<sys::cublasLtMatmulAlgo_t>, String> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Preference;
        let failed = |error| format!("cublasLtMatmulAlgoGetHeuristic: {}", name(error));
        let preference = result::create_matmul_pref().map_err(failed)?;
        // Parts of a sum are never added up in 16 bits.
        let reductions = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        let settings = [
            (Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, out),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, out),
        ];
        // SAFETY: an all-zero result is a valid value of the plain C struct (status 0 is success).
        let mut found: [sys::cublasLtMatmulHeuristicResult_t; tune::CANDIDATES] = unsafe { std::mem::zeroed() };
        let wanted = if tune::is_on() { tune::CANDIDATES } else { CANDIDATES };
        let mut count = 0;
        // SAFETY: preference, descriptors and layouts are alive; the attributes have the sizes given (64 bits for the
        // workspace, 32 for the others); `found` has room for what is asked for.
        let status = unsafe {
            let set = |attribute, value, size| result::set_matmul_pref_attribute(preference, attribute, value, size);
            let mut status = set(Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, bytes(&WORKSPACE), 8);
            for (attribute, value) in &settings {
                status = status.and_then(|()| set(*attribute, bytes(value), 4));
            }
            let status = status.and_then(|()| {
                sys::cublasLtMatmulAlgoGetHeuristic(
                    handle,
                    self.operation,
                    self.first,
                    self.second,
                    self.out,
                    self.out,
                    preference,
                    wanted as i32,
                    found.as_mut_ptr(),
                    &mut count,
                )
                .result()
            });
            status.and(result::destroy_matmul_pref(preference))
        };
        status.map_err(failed)?;
        let works = |found: &&sys::cublasLtMatmulHeuristicResult_t| {
            found.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS && found.workspaceSize <= WORKSPACE
        };
        Ok(found[..count as usize].iter().filter(works).map(|found| found.algo).collect())
    }

    /// Queues the product by the first algorithm that the library accepts.
    ///
    /// # Safety
    ///
    /// As [`run`].
    unsafe fn launch(
        &mut self,
        handle: sys::cublasLtHandle_t,
        workspace: CUdeviceptr,
        [a, b, out]: [*mut c_void; 3],
        stream: CUstream,
    ) -> Result<(), String> {
        let add = self.onto == Onto::Add;
        let single: [f32; 2] = [1.0, if add { 1.0 } else { 0.0 }];
        let double: [f64; 2] = single.map(f64::from);
        let scale = |i: usize| if self.double { bytes(&double[i]) } else { bytes(&single[i]) };
        let mut refused = None;
        while let Some(algorithm) = self.algorithms.first() {
            // SAFETY: the descriptors describe the pointers' contents; the factors have the descriptor's scale type.
            let done = unsafe {
                result::matmul(
                    handle,
                    self.operation,
                    scale(0),
                    scale(1),
                    b,
                    self.first,
                    a,
                    self.second,
                    out,
                    self.out,
                    out,
                    self.out,
                    algorithm,
                    workspace as *mut c_void,
                    WORKSPACE,
                    stream as sys::cudaStream_t,
                )
            };
            use sys::cublasStatus_t::{CUBLAS_STATUS_INVALID_VALUE, CUBLAS_STATUS_NOT_SUPPORTED};
            match done {
                Ok(()) => return Ok(()),
                // Refused before anything ran.
                Err(error) if [CUBLAS_STATUS_INVALID_VALUE, CUBLAS_STATUS_NOT_SUPPORTED].contains(&error.0) => {
                    refused = Some(error);
                    self.algorithms.remove(0);
                }
                Err(error) => return Err(format!("cublasLtMatmul: {}", name(error))),
            }
        }
        let reason = refused.map_or("none is suggested".into(), name);
        Err(format!("cuBLASLt has no algorithm for it on this GPU ({reason})"))
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: made by the matching functions, and used by nothing else. An error leaves a few bytes behind.
        unsafe {
            let _ = result::destroy_matmul_desc(self.operation);
            for layout in [self.first, self.second, self.out].into_iter().filter(|layout| !layout.is_null()) {
                let _ = result::destroy_matrix_layout(layout);
            }
        }
    }
}

fn layout(stored: &Stored, kind: sys::cudaDataType, batches: usize) -> Result<sys::cublasLtMatrixLayout_t, String> {
    use sys::cublasLtMatrixLayoutAttribute_t as Attribute;
    let failed = |error| format!("layout {stored:?}: {}", name(error));
    let layout = result::create_matrix_layout(kind, stored.rows as u64, stored.columns as u64, stored.ld as i64);
    let layout = layout.map_err(failed)?;
    let (count, offset) = (batches as i32, stored.batch as i64);
    // SAFETY: the layout is alive; the count has 32 bits, the offset 64.
    let batch = unsafe {
        result::set_matrix_layout_attribute(layout, Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, bytes(&count), 4)
            .and_then(|()| {
                let attribute = Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
                result::set_matrix_layout_attribute(layout, attribute, bytes(&offset), 8)
            })
    };
    batch.map(|()| layout).map_err(failed)
}

/// Multiprocessors of the current context's device.
fn processors() -> Result<i32, String> {
    let attribute = driver_sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    let mut device = 0;
    // SAFETY: the device is written before it is read.
    let count = unsafe {
        let found = driver_sys::cuCtxGetDevice(&mut device).result();
        found.and_then(|()| driver::device::get_attribute(device, attribute))
    };
    count.map_err(|error| format!("the number of multiprocessors: {error}"))
}

fn bytes<T>(value: &T) -> *const c_void {
    std::ptr::from_ref(value).cast()
}

/// The name of the library's status, as in its manual.
fn name(error: result::CublasError) -> String {
    format!("{:?}", error.0)
}
