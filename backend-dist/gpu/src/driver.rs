//! Queries to the CUDA driver, NCCL and cuBLASLt, each after a check that the library can be loaded: cudarc panics if
//! it is missing.

use super::{GpuError, GpuInfo, Library, MemoryInfo, Version, library, visible};
use cudarc::driver::sys::{CUdevice, CUdevice_attribute_enum as Attribute, CUresult};
use cudarc::driver::{result as driver, sys};
use cudarc::{cublaslt, nccl};
use std::ffi::{CStr, c_int};
use std::sync::OnceLock;

/// Loads the library once.
fn loaded(library: Library) -> Result<(), GpuError> {
    static LOADED: [OnceLock<bool>; 3] = [const { OnceLock::new() }; 3];
    let (slot, present): (usize, unsafe fn() -> bool) = match library {
        Library::Driver => (0, sys::is_culib_present),
        Library::Nccl => (1, nccl::sys::is_culib_present),
        Library::CublasLt => (2, cublaslt::sys::is_culib_present),
        Library::Libdevice => return super::libdevice().map(|_| ()),
    };
    // SAFETY: loading a library runs its initialisers; these are NVIDIA's and expect to be loaded at any time.
    let is_there = *LOADED[slot].get_or_init(|| unsafe { present() });
    if is_there { Ok(()) } else { Err(library.missing(&library::folders())) }
}

fn call(what: impl Into<String>) -> impl FnOnce(driver::DriverError) -> GpuError {
    let what = what.into();
    move |error| GpuError::Call { what, message: error.to_string() }
}

fn init() -> Result<(), GpuError> {
    loaded(Library::Driver)?;
    driver::init().map_err(|error| match error.0 {
        CUresult::CUDA_ERROR_NO_DEVICE => GpuError::NoGpu { visible: visible() },
        _ => call("starting the CUDA driver")(error),
    })
}

fn device(index: usize) -> Result<CUdevice, GpuError> {
    driver::device::get(index as c_int).map_err(call(format!("GPU {index}")))
}

/// The GPUs that this process may use.
///
/// # Errors
/// If the driver is missing or reports none.
pub fn gpus() -> Result<Vec<GpuInfo>, GpuError> {
    init()?;
    let count = driver::device::get_count().map_err(call("counting GPUs"))?;
    if count == 0 {
        return Err(GpuError::NoGpu { visible: visible() });
    }
    (0..count as usize).map(gpu).collect()
}

fn gpu(index: usize) -> Result<GpuInfo, GpuError> {
    let device = device(index)?;
    // SAFETY: `device` comes from the driver.
    let attribute = |kind| unsafe { driver::device::get_attribute(device, kind) };
    let ask = || -> Result<GpuInfo, driver::DriverError> {
        Ok(GpuInfo {
            index,
            name: driver::device::get_name(device)?,
            // SAFETY: as above.
            total: unsafe { driver::device::total_mem(device)? } as u64,
            capability: (
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? as u32,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)? as u32,
            ),
            processors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize,
            bus: bus(device)?,
        })
    };
    ask().map_err(call(format!("GPU {index}")))
}

fn bus(device: CUdevice) -> Result<String, driver::DriverError> {
    let mut text = [0u8; 32];
    // SAFETY: the length is that of the buffer; the driver ends the text with a zero.
    unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr().cast(), text.len() as c_int, device).result()? };
    let text = CStr::from_bytes_until_nul(&text).map(|text| text.to_string_lossy().into_owned());
    Ok(text.unwrap_or_default())
}

/// In the process's own context, which is created if there is none yet.
pub(super) fn memory(index: usize) -> Result<MemoryInfo, GpuError> {
    init()?;
    let device = device(index)?;
    let ask = || -> Result<MemoryInfo, driver::DriverError> {
        let before = driver::ctx::get_current()?;
        // SAFETY: the primary context is retained before use, and the current context is restored.
        let (free, total) = unsafe {
            driver::ctx::set_current(driver::primary_ctx::retain(device)?)?;
            let found = driver::mem_get_info();
            driver::ctx::set_current(before.unwrap_or(std::ptr::null_mut()))?;
            driver::primary_ctx::release(device)?;
            found?
        };
        Ok(MemoryInfo { free: free as u64, total: total as u64 })
    };
    ask().map_err(call(format!("memory of GPU {index}")))
}

/// Whether GPU `a` can read and write the memory of GPU `b` directly.
///
/// # Errors
/// If the driver is missing or there is no such GPU.
pub fn reaches(a: usize, b: usize) -> Result<bool, GpuError> {
    init()?;
    let mut answer = 0;
    // SAFETY: the driver writes the answer; both devices come from it.
    let code = unsafe { sys::cuDeviceCanAccessPeer(&mut answer, device(a)?, device(b)?) };
    code.result().map_err(call(format!("peer access from GPU {a} to GPU {b}")))?;
    Ok(answer != 0)
}

pub(super) fn cuda_version() -> Result<Version, GpuError> {
    loaded(Library::Driver)?;
    let mut version = 0;
    // SAFETY: the driver writes the number.
    unsafe { sys::cuDriverGetVersion(&mut version).result().map_err(call("version of the CUDA driver"))? };
    Ok(Version { major: version as u32 / 1000, minor: version as u32 % 1000 / 10, patch: 0 })
}

/// Version of NCCL.
///
/// # Errors
/// If it is missing.
pub fn nccl_version() -> Result<Version, GpuError> {
    loaded(Library::Nccl)?;
    let version = nccl::result::get_nccl_version()
        .map_err(|error| GpuError::Call { what: "version of NCCL".into(), message: format!("{error:?}") })?
        as u32;
    // NCCL_VERSION of nccl.h, from 2.9 on.
    Ok(Version { major: version / 10_000, minor: version % 10_000 / 100, patch: version % 100 })
}

/// Version of cuBLASLt.
///
/// # Errors
/// If it is missing.
pub fn cublas_lt_version() -> Result<Version, GpuError> {
    use cublaslt::sys::libraryPropertyType_t::{MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL};
    loaded(Library::CublasLt)?;
    let part = |kind| {
        let mut value = 0;
        // SAFETY: the library writes the number.
        let status = unsafe { cublaslt::sys::cublasLtGetProperty(kind, &mut value) };
        status
            .result()
            .map(|()| value as u32)
            .map_err(|error| GpuError::Call { what: "version of cuBLASLt".into(), message: format!("{error:?}") })
    };
    Ok(Version { major: part(MAJOR_VERSION)?, minor: part(MINOR_VERSION)?, patch: part(PATCH_LEVEL)? })
}
