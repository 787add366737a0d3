//! A build without GPUs asks no driver.
#![allow(missing_docs, reason = "the same functions with the feature `cuda` have them")]

use super::{GpuError, GpuInfo, MemoryInfo, Version};

pub fn gpus() -> Result<Vec<GpuInfo>, GpuError> {
    Err(GpuError::NotBuilt)
}

pub(super) fn memory(_: usize) -> Result<MemoryInfo, GpuError> {
    Err(GpuError::NotBuilt)
}

pub fn reaches(_: usize, _: usize) -> Result<bool, GpuError> {
    Err(GpuError::NotBuilt)
}

pub(super) fn cuda_version() -> Result<Version, GpuError> {
    Err(GpuError::NotBuilt)
}

pub fn nccl_version() -> Result<Version, GpuError> {
    Err(GpuError::NotBuilt)
}

pub fn cublas_lt_version() -> Result<Version, GpuError> {
    Err(GpuError::NotBuilt)
}
