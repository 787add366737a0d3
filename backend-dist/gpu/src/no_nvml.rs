//! A build without GPUs measures none.

use super::{MemoryInfo, Readings};

pub(super) fn driver_version() -> Option<String> {
    None
}

pub(super) fn memory(_: &str) -> Option<MemoryInfo> {
    None
}

pub(super) fn readings(_: &str) -> Option<Readings> {
    None
}
