//! What NCCL says of its calls, as text.

use cudarc::nccl::{result as nccl, sys};
use std::ffi::CStr;

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

/// Makes the calls of `f` one operation. The group ends also where one of them fails: it would keep all later calls of
/// this thread from being launched.
pub(crate) fn grouped(f: impl FnOnce() -> Result<(), nccl::NcclError>) -> Result<nccl::NcclStatus, nccl::NcclError> {
    nccl::group_start()?;
    let (done, ended) = (f(), nccl::group_end());
    done.and(ended)
}
