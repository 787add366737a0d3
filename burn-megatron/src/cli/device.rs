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

/// What the first GPU says of itself.
#[derive(Clone, Debug)]
pub struct GpuFacts {
    /// As its driver calls it.
    pub name: String,
    /// Bytes of its memory.
    pub memory: u64,
    /// Versions of driver, CUDA and libraries, by name.
    pub versions: Vec<(String, String)>,
}

impl Place {
    /// Ranks where nothing says how many.
    ///
    /// # Errors
    /// If GPUs cannot be counted.
    pub fn ranks(self) -> anyhow::Result<usize> {
        match self {
            Place::Cpu => Ok(2),
            #[cfg(feature = "cuda")]
            Place::Cuda => Ok(Device::enumerate(burn::tensor::DeviceType::Cuda).into_vec().len().max(1)),
        }
    }

    /// The first GPU, if ranks run on GPUs.
    ///
    /// # Errors
    /// If it does not answer.
    pub fn gpu(self) -> anyhow::Result<Option<GpuFacts>> {
        match self {
            Place::Cpu => Ok(None),
            #[cfg(feature = "cuda")]
            Place::Cuda => {
                let device = Device::cuda(0);
                let name = device.identity().map(|identity| identity.name).unwrap_or_default();
                Ok(Some(GpuFacts { name, memory: device.memory_capacity().unwrap_or(0), versions: Vec::new() }))
            }
        }
    }

    /// A device for each rank.
    pub fn devices(self, ranks: usize) -> Vec<Device> {
        match self {
            Place::Cpu => vec![Device::flex(); ranks],
            #[cfg(feature = "cuda")]
            Place::Cuda => (0..ranks).map(Device::cuda).collect(),
        }
    }
}
