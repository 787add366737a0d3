//! Errors of work on CubeCL's thread, on their way to the thread that issued it.
//!
//! Work is issued without waiting, so its error comes later. The issuing thread panics with it at its next call of
//! [`submit`](super::submit); until then nothing can read what was not written, because CubeCL holds those buffers for
//! failed.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use cubecl_common::device::DeviceId;

/// Whether [`ERRORS`] holds anything: every operation asks.
static ANY: AtomicBool = AtomicBool::new(false);
/// The first error of each device that nobody has seen yet.
static ERRORS: Mutex<Vec<(DeviceId, String)>> = Mutex::new(Vec::new());

/// Keeps `message` for the next operation on `device`, unless an earlier error waits there.
pub(crate) fn note(device: DeviceId, message: String) {
    let mut errors = ERRORS.lock().unwrap_or_else(PoisonError::into_inner);
    if errors.iter().all(|(other, _)| *other != device) {
        errors.push((device, message));
    }
    ANY.store(true, Ordering::Release);
}

/// # Panics
/// If earlier work on `device` failed; with its error.
pub(super) fn check(device: DeviceId) {
    if !ANY.load(Ordering::Acquire) {
        return;
    }
    let message = {
        let mut errors = ERRORS.lock().unwrap_or_else(PoisonError::into_inner);
        let at = errors.iter().position(|(other, _)| *other == device);
        let message = at.map(|at| errors.swap_remove(at).1);
        ANY.store(!errors.is_empty(), Ordering::Release);
        message
    };
    if let Some(message) = message {
        panic!("GPU {}: {message}", device.index_id);
    }
}
