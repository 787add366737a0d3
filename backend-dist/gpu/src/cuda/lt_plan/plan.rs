//! The descriptors of one kind of GEMM, and its launch.

use std::ffi::c_void;

use cudarc::cublaslt::{result, sys};
use cudarc::driver::result as driver;
use cudarc::driver::sys::{self as driver_sys, CUdeviceptr, CUstream};

use kernels_cubecl::fp8::Granularity;

use super::kinds::{Mixed, Onto, Sums};
use super::{Extras, Key, WORKSPACE};
use crate::column_major::Stored;

/// Descriptors of one kind of GEMM, and the algorithms for it, the best first.
pub(super) struct Plan {
    pub(super) operation: sys::cublasLtMatmulDesc_t,
    pub(super) first: sys::cublasLtMatrixLayout_t,
    pub(super) second: sys::cublasLtMatrixLayout_t,
    pub(super) out: sys::cublasLtMatrixLayout_t,
    pub(super) algorithms: Vec<sys::cublasLtMatmulAlgo_t>,
    onto: Onto,
    double: bool,
}

impl Plan {
    pub(super) fn new(handle: sys::cublasLtHandle_t, key: &Key, extras: Extras) -> Result<Self, String> {
        let Key { problem, kinds, onto, bias, fp8, alignments } = *key;
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
        if let Some((sums, [a, b])) = fp8 {
            // SAFETY: the attribute is an 8-bit integer.
            unsafe { plan.describe(Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, i8::from(sums == Sums::Fast)) }?;
            if a != Granularity::Tensor {
                // `b` is cuBLASLt's first operand, see `Problem`.
                scale_modes(plan.operation, [b, a])?;
            }
        }
        plan.set(extras)?;
        plan.first = layout(&problem.first, kinds.b, problem.batches)?;
        plan.second = layout(&problem.second, kinds.a, problem.batches)?;
        plan.out = layout(&problem.out, kinds.out, problem.batches)?;
        if problem.reserved_sms > 0 {
            let target = sms()?.saturating_sub(problem.reserved_sms as i32).max(1);
            // SAFETY: the attribute is a 32-bit integer.
            unsafe { plan.describe(Attribute::CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, target) }?;
        }
        plan.algorithms = plan.heuristic(handle, alignments)?;
        Ok(plan)
    }

    /// Sets the pointers of the next launch. The descriptor is read when a GEMM is queued, so one plan serves many
    /// biases and scales.
    pub(super) fn set(&self, extras: Extras) -> Result<(), String> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let scales = extras.scales.map(|[a, b]| {
            // `b` is cuBLASLt's first operand, see `Problem`.
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
        // SAFETY: the descriptor is alive; the caller guarantees the size.
        unsafe { result::set_matmul_desc_attribute(self.operation, attribute, bytes(&value), size_of::<T>()) }
            .map_err(|error| format!("cublasLtMatmulDescSetAttribute ({attribute:?}): {}", name(error)))
    }

    /// Queues the GEMM with the first supported algorithm.
    ///
    /// # Safety
    ///
    /// As [`run`](super::run).
    pub(super) unsafe fn launch(
        &mut self,
        handle: sys::cublasLtHandle_t,
        workspace: CUdeviceptr,
        [a, b, out]: [*mut c_void; 3],
        mixed: Option<Mixed>,
        stream: CUstream,
    ) -> Result<(), String> {
        let (added, double) = match mixed {
            Some(Mixed { alpha, beta, left }) => (if left { a } else { b }, [alpha, beta]),
            None => (out, [1.0, if self.onto == Onto::Add { 1.0 } else { 0.0 }]),
        };
        let single = double.map(|factor| factor as f32);
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
                    added,
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
                // Refused before anything was launched.
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
        // SAFETY: created by the matching functions, and used by nothing else. An error leaks a few bytes.
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

/// SMs of the current context's device.
fn sms() -> Result<i32, String> {
    let attribute = driver_sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    let mut device = 0;
    // SAFETY: the device is written before it is read.
    let count = unsafe {
        let found = driver_sys::cuCtxGetDevice(&mut device).result();
        found.and_then(|()| driver::device::get_attribute(device, attribute))
    };
    count.map_err(|error| format!("the number of SMs: {error}"))
}

pub(super) fn bytes<T>(value: &T) -> *const c_void {
    std::ptr::from_ref(value).cast()
}

/// The name of a cuBLAS status, as in its manual.
pub(super) fn name(error: result::CublasError) -> String {
    format!("{:?}", error.0)
}

/// Sets which values of the operands share a scale. By number, because cudarc has these names only where it is built with
/// CUDA 12.9 or later.
fn scale_modes(operation: sys::cublasLtMatmulDesc_t, operands: [Granularity; 2]) -> Result<(), String> {
    type SetAttribute =
        unsafe extern "C" fn(sys::cublasLtMatmulDesc_t, u32, *const c_void, usize) -> sys::cublasStatus_t;
    // `CUBLASLT_MATMUL_DESC_A_SCALE_MODE` and that of B.
    const ATTRIBUTES: [u32; 2] = [31, 32];
    // SAFETY: cuBLASLt is loaded, and its function has this type; the attribute is an enumeration of 32 bits.
    let set = unsafe { sys::culib().get::<SetAttribute>(b"cublasLtMatmulDescSetAttribute\0") };
    let set = set.map_err(|error| error.to_string())?;
    for (attribute, granularity) in ATTRIBUTES.into_iter().zip(operands) {
        // `cublasLtMatmulMatrixScale_t`.
        let mode: u32 = match granularity {
            Granularity::Tensor => 0,
            Granularity::Vector => 4,
            Granularity::Block => 5,
        };
        // SAFETY: the descriptor is alive.
        let status = unsafe { set(operation, attribute, bytes(&mode), size_of::<u32>()) };
        status.result().map_err(|error| {
            format!("{}: FP8 with scales of blocks (fp8.recipe = blockwise) needs cuBLASLt 12.9 or later", name(error))
        })?;
    }
    Ok(())
}
