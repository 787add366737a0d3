//! The NCCL and CUDA driver libraries: whether NCCL is there, its version, its errors as text.

use cudarc::nccl::{result as nccl, sys};
use std::ffi::CStr;
use std::sync::OnceLock;

/// The version of the loaded NCCL as `(major, minor, patch)`.
///
/// # Errors
/// If NCCL is not installed; the message names the package.
pub(crate) fn nccl_version() -> Result<(i32, i32, i32), String> {
    static VERSION: OnceLock<Result<(i32, i32, i32), String>> = OnceLock::new();
    let load = || {
        // SAFETY: loading NCCL runs its initialisers, which need nothing.
        if !unsafe { sys::is_culib_present() } {
            return Err("libnccl.so is not installed, and GPUs exchange tensors through it: install the package \
                        `libnccl2` (or `nvidia-nccl`), or add the folder it is in to LD_LIBRARY_PATH"
                .into());
        }
        let code = nccl::get_nccl_version().map_err(text)?;
        // NCCL_VERSION_CODE of nccl.h, from 2.9 on.
        Ok((code / 10_000, code / 100 % 100, code % 100))
    };
    VERSION.get_or_init(load).clone()
}

/// What NCCL says about an error, and about the last thing it warned of.
pub(crate) fn text(error: nccl::NcclError) -> String {
    // SAFETY: both return null or a string that NCCL owns and keeps; the communicator argument is not used.
    let (kind, last) = unsafe { (sys::ncclGetErrorString(error.0), sys::ncclGetLastError(std::ptr::null_mut())) };
    let [kind, last] = [kind, last].map(|text| match text.is_null() {
        true => String::new(),
        // SAFETY: as above.
        false => unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_string(),
    });
    if last.is_empty() { kind } else { format!("{kind} ({last})") }
}

/// An error unless an NCCL call is over.
pub(crate) fn finished(outcome: Result<nccl::NcclStatus, nccl::NcclError>) -> Result<(), String> {
    match outcome.map_err(text)? {
        nccl::NcclStatus::InProgress => Err("communicators must block: unset NCCL_COMM_BLOCKING".into()),
        _ => Ok(()),
    }
}
