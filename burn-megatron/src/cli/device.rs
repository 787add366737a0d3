//! Where the ranks of a command run.

use burn::tensor::Device;
use clap::ValueEnum;

/// Where ranks run.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum Place {
    /// Threads on the CPU
    Cpu,
    /// Rank r on GPU r
    #[cfg(feature = "cuda")]
    Cuda,
}

impl Place {
    /// The devices of so many ranks.
    pub fn devices(self, ranks: usize) -> Vec<Device> {
        match self {
            Place::Cpu => vec![Device::flex(); ranks],
            #[cfg(feature = "cuda")]
            Place::Cuda => (0..ranks).map(Device::cuda).collect(),
        }
    }
}
