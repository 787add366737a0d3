//! NCCL's results as text.

use cudarc::nccl::{result as nccl, sys};
use std::ffi::CStr;

/// NCCL's text of an error, and of its last warning.
pub(crate) fn text(error: nccl::NcclError) -> String {
    // SAFETY: both return null or a string that NCCL owns; the communicator argument is not used.
    let (kind, last) = unsafe { (sys::ncclGetErrorString(error.0), sys::ncclGetLastError(std::ptr::null_mut())) };
    let [kind, last] = [kind, last].map(|text| match text.is_null() {
        true => String::new(),
        // SAFETY: as above.
        false => unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_string(),
    });
    if last.is_empty() { kind } else { format!("{kind} ({last})") }
}

/// An error unless an NCCL call is complete.
pub(crate) fn finished(outcome: Result<nccl::NcclStatus, nccl::NcclError>) -> Result<(), String> {
    match outcome.map_err(text)? {
        nccl::NcclStatus::InProgress => Err("communicators must block: unset NCCL_COMM_BLOCKING".into()),
        _ => Ok(()),
    }
}

/// Sets the flags that end kernels and calls of a communicator. What frees it is left to [`free_raised`]: in a group,
/// `ncclCommAbort` only queues that (since NCCL 2.22; `ncclAsyncLaunch` in its src/group.cc). Groups are a thread's own, and
/// the calling thread does nothing else.
///
/// # Safety
/// The communicator has not ended.
pub(crate) unsafe fn raise(comm: usize) -> Result<(), String> {
    // SAFETY: as promised by the caller.
    finished(nccl::group_start().and_then(|_| unsafe { nccl::comm_abort(comm as _) }))
}

/// Frees what this thread has [raised](raise).
pub(crate) fn free_raised() -> Result<(), String> {
    finished(nccl::group_end())
}

/// Groups the calls of `f` into one operation. The group ends even if one of them fails: otherwise all later calls of
/// this thread would not be launched.
pub(crate) fn grouped(f: impl FnOnce() -> Result<(), nccl::NcclError>) -> Result<nccl::NcclStatus, nccl::NcclError> {
    nccl::group_start()?;
    let (done, ended) = (f(), nccl::group_end());
    done.and(ended)
}
