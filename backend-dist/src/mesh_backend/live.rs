//! The logical devices that exist.

use super::channel::MeshClient;
use burn::tensor::Device;
use parking_lot::Mutex;
use ranks::mesh::Axis;

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
        LIVE.lock().push(self);
    }

    /// No more.
    pub fn end(device: &Device) {
        LIVE.lock().retain(|live| live.device != *device);
    }
}

/// The logical device that is `device` or that `device` is around.
pub(super) fn live(device: &Device) -> Option<Live> {
    LIVE.lock().iter().find(|live| live.device == *device).cloned()
}
