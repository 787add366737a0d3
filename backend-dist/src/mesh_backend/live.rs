//! The logical devices that exist.

use super::channel::MeshClient;
use burn::tensor::Device;
use ranks::mesh::Axis;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A logical device that exists.
#[derive(Clone)]
pub(super) struct Live {
    pub device: Device,
    pub client: MeshClient,
    pub axes: Vec<Axis>,
    /// Along each of the axes.
    pub ranks: Vec<usize>,
}

static LIVE: Mutex<Vec<Live>> = Mutex::new(Vec::new());

impl Live {
    /// From now on.
    pub fn begin(self) {
        lock().push(self);
    }

    /// No more.
    pub fn end(device: &Device) {
        lock().retain(|live| live.device != *device);
    }
}

/// The logical device that is `device` or that `device` is around.
pub(super) fn live(device: &Device) -> Option<Live> {
    lock().iter().find(|live| live.device == *device).cloned()
}

fn lock() -> MutexGuard<'static, Vec<Live>> {
    LIVE.lock().unwrap_or_else(PoisonError::into_inner)
}
