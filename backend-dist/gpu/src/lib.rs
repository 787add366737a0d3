//! The GPUs of one process, under CubeCL's tensors: which there are, their memory and libraries, and what CubeCL has no
//! function for. It knows no ranks and no communication.
//!
//! - [`gpus`], [`require`], [`memory_use()`]: this machine's GPUs and their memory, and whether all libraries of a GPU run
//!   can be loaded.
//! - [`buffer`]: flat arrays in GPU memory; [`host_copy`]: page-locked host memory, for copies of them.
//! - [`profile`]: kernels and their times.
//!
//! Modules that the documentation leaves out are for the operations and collectives of this project: pointers, streams
//! and cuBLASLt. Built without the feature `cuda`, every function that queries the driver returns
//! [`GpuError::NotBuilt`].

#[cfg(any(feature = "cuda", test))]
mod abandoned;
#[cfg(feature = "cuda")]
#[doc(hidden)]
pub mod allocator;
pub mod buffer;
#[cfg(any(feature = "cuda", test))]
#[doc(hidden)]
pub mod column_major;
#[cfg(feature = "cuda")]
#[doc(hidden)]
pub mod cuda;
#[cfg_attr(not(feature = "cuda"), path = "no_driver.rs")]
mod driver;
#[cfg(any(feature = "cuda", test))]
#[doc(hidden)]
pub mod failed;
pub mod host_copy;
#[cfg(feature = "cuda")]
pub mod idle;
mod library;
#[doc(hidden)]
pub mod memory_use;
mod no_fusion;
#[cfg_attr(not(feature = "cuda"), path = "no_nvml.rs")]
mod nvml;
#[cfg(feature = "cuda")]
pub mod occupy;
mod out_of_memory;
pub mod profile;
mod recording;
mod settle;

pub use driver::{cublas_lt_version, gpus, nccl_version, reaches};
pub use layouts::gpu_model as model;
pub use library::{Library, libdevice};
pub use memory_use::{MemoryUse, StreamUse, memory_use};
use model::GpuModel;
#[cfg(feature = "cuda")]
#[doc(hidden)]
pub use out_of_memory::out_of_memory_on;
pub use out_of_memory::{index, out_of_memory, release_memory};
pub use recording::{Recording, overwrite, part};
use serde::{Deserialize, Serialize};
pub use settle::settle;
use std::fmt;

/// CUDA's stream-ordered pool, which allocates CubeCL's pages, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolUse {
    /// Allocated from the GPU.
    pub reserved: u64,
    /// The bytes of `reserved` that CubeCL has not freed.
    pub used: u64,
    /// Peak of `reserved` since the last [`release_memory`].
    pub most_reserved: u64,
    /// Peak of `used`.
    pub most_used: u64,
}

/// Why GPUs cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum GpuError {
    /// The program was built without GPU support.
    #[error("this program was built without GPUs; build it with `cargo build --release --features cuda`")]
    NotBuilt,
    /// A library cannot be loaded.
    #[error("{library} cannot be loaded: {advice}")]
    Library { library: Library, advice: String },
    /// The driver is installed, but there is no GPU.
    #[error("the NVIDIA driver sees no GPU{}", hidden(.visible))]
    NoGpu { visible: Option<String> },
    /// More GPUs are needed than there are.
    #[error("{asked} ranks need a GPU each, this machine has {present}{}", hidden(.visible))]
    TooFew { asked: usize, present: usize, visible: Option<String> },
    /// A call failed.
    #[error("{what}: {message}")]
    Call { what: String, message: String },
}

fn hidden(visible: &Option<String>) -> String {
    visible.as_ref().map_or_else(String::new, |list| format!(" (CUDA_VISIBLE_DEVICES is `{list}`)"))
}

/// A version of a library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Major.
    pub major: u32,
    /// Minor.
    pub minor: u32,
    /// Patch; 0 for CUDA itself, which has none.
    pub patch: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// Versions of driver and CUDA.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverVersion {
    /// The driver's version, for example `580.95.05`; `None` without NVML.
    pub driver: Option<String>,
    /// The latest CUDA version that the driver supports.
    pub cuda: Version,
}

/// A GPU, in CUDA's order: rank `r` of a host owns the one with index `r`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuInfo {
    /// CUDA's index.
    pub index: usize,
    /// For example `NVIDIA H200`.
    pub name: String,
    /// Bytes of memory.
    pub total: u64,
    /// Compute capability, for example `(9, 0)`.
    pub capability: (u32, u32),
    /// Number of SMs.
    pub processors: usize,
    /// PCI bus address, for example `0000:1b:00.0`, which identifies the GPU in NVML and `nvidia-smi`.
    pub bus: String,
}

impl GpuInfo {
    /// Its data sheet, or an estimate where there is none here.
    pub fn model(&self) -> GpuModel {
        let known = GpuModel::named(&self.name).copied();
        known.unwrap_or_else(|| GpuModel::estimate(self.capability, self.processors, self.total))
    }
}

/// The model of the first GPU that this process may use. The GPUs of a run are alike.
#[cfg(feature = "cuda")]
pub fn first_model() -> &'static GpuModel {
    static FIRST: std::sync::OnceLock<GpuModel> = std::sync::OnceLock::new();
    FIRST.get_or_init(|| gpus().map_or(model::GPUS[0], |gpus| gpus[0].model()))
}

/// Memory of a GPU in bytes, over all processes that use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Not allocated.
    pub free: u64,
    /// In total.
    pub total: u64,
}

impl MemoryInfo {
    /// Bytes in use, including those of the driver.
    pub fn used(&self) -> u64 {
        self.total.saturating_sub(self.free)
    }
}

/// NVML's measurements; `None` where a GPU has no answer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Readings {
    /// Percent of the last sampling period (up to a second) in which a kernel ran.
    pub utilisation: Option<u32>,
    /// Clock of the SMs in MHz.
    pub clock: Option<u32>,
    /// Maximum clock of the SMs in MHz.
    pub max_clock: Option<u32>,
    /// Power in watts.
    pub power: Option<f64>,
    /// Power limit in watts, at which the clock is lowered.
    pub power_limit: Option<f64>,
    /// Degrees Celsius.
    pub temperature: Option<u32>,
    /// NVLinks that are up.
    pub nvlinks: Option<usize>,
}

/// Versions of driver and CUDA.
///
/// # Errors
/// If the driver is missing.
pub fn driver_version() -> Result<DriverVersion, GpuError> {
    Ok(DriverVersion { cuda: driver::cuda_version()?, driver: nvml::driver_version() })
}

impl GpuInfo {
    /// Memory in use on this GPU now, by all processes.
    ///
    /// # Errors
    /// If the driver has no answer.
    pub fn memory(&self) -> Result<MemoryInfo, GpuError> {
        nvml::memory(&self.bus).map_or_else(|| driver::memory(self.index), Ok)
    }

    /// NVML's measurements now; all `None` without NVML.
    pub fn readings(&self) -> Readings {
        nvml::readings(&self.bus).unwrap_or_default()
    }
}

/// Checks that `count` ranks of this host can have a GPU each, and that all libraries that they load are installed.
///
/// # Errors
/// The first missing thing, and what to do about it.
pub fn require(count: usize) -> Result<Vec<GpuInfo>, GpuError> {
    let gpus = gpus()?;
    if gpus.len() < count {
        return Err(GpuError::TooFew { asked: count, present: gpus.len(), visible: visible() });
    }
    cublas_lt_version()?;
    if count > 1 {
        nccl_version()?;
    }
    libdevice()?;
    Ok(gpus)
}

/// `CUDA_VISIBLE_DEVICES`, if set.
fn visible() -> Option<String> {
    std::env::var("CUDA_VISIBLE_DEVICES").ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_few_gpus_are_two_numbers() {
        let error = GpuError::TooFew { asked: 8, present: 2, visible: Some("0,1".into()) };
        let text = error.to_string();
        assert!(
            text.starts_with("8 ranks need a GPU each, this machine has 2 (CUDA_VISIBLE_DEVICES is `0,1`)"),
            "{text}"
        );
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn a_program_without_gpus_says_how_to_build_one_with() {
        assert_eq!(require(1), Err(GpuError::NotBuilt));
        assert!(GpuError::NotBuilt.to_string().contains("--features cuda"));
    }
}
