//! Where a command's ranks run.

use burn::tensor::Device;
use clap::ValueEnum;

/// Where ranks run.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Place {
    /// Threads on the CPU
    Cpu,
    /// Rank r on GPU r
    #[cfg(feature = "cuda")]
    Cuda,
}

impl Place {
    /// A device for each rank.
    pub fn devices(self, ranks: usize) -> Vec<Device> {
        match self {
            Place::Cpu => vec![Device::flex(); ranks],
            #[cfg(feature = "cuda")]
            Place::Cuda => (0..ranks).map(Device::cuda).collect(),
        }
    }
}
