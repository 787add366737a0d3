//! What a rank's device says of itself: memory, idle time, clocks.

use backend_dist::gpu::gpus;
use backend_dist::launch::Rank;
use backend_dist::memory;
use burn::tensor::Device;

use super::RankReading;
use crate::plan::gpus::GpuModel;

/// Whether a device is a GPU.
pub fn on_gpu(device: &Device) -> bool {
    *device != Device::flex()
}

/// FLOP/s of a GPU's dense GEMMs with weights of `element` bytes, by its data sheet; `None` of a CPU or of a
/// GPU that [`plan`](crate::plan::gpus) does not know. The GPUs of a host are taken to be of one kind.
pub fn peak(device: &Device, element: u64) -> Option<f64> {
    let gpus = on_gpu(device).then(|| gpus().ok()).flatten()?;
    Some(GpuModel::named(&gpus.first()?.name)?.peak(element))
}

/// The mean over the ranks that have a value.
pub fn mean(readings: &[RankReading], of: impl Fn(&RankReading) -> Option<f64>) -> Option<f64> {
    let values: Vec<f64> = readings.iter().filter_map(of).collect();
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// Looks at a rank's device; belongs to the rank's thread.
pub struct Gauge {
    rank: Rank,
    #[cfg(feature = "cuda")]
    gpu: Option<super::gpu_watch::GpuWatch>,
}

impl Gauge {
    /// A gauge of the rank that the calling thread is.
    pub fn new(rank: &Rank) -> Self {
        Self {
            rank: rank.clone(),
            #[cfg(feature = "cuda")]
            gpu: super::gpu_watch::GpuWatch::start(&rank.device),
        }
    }

    /// Starts a new measurement.
    pub fn begin(&mut self) {
        memory::reset_peak(self.rank.rank);
        #[cfg(feature = "cuda")]
        if let Some(gpu) = &self.gpu {
            gpu.begin();
        }
    }

    /// The reading of a GPU since [`begin`](Self::begin); `None` of a CPU rank. Does not ask the allocator, which
    /// would wait for what is queued.
    pub fn read_gpu(&self) -> Option<RankReading> {
        #[cfg(feature = "cuda")]
        return self.gpu.as_ref().map(|gpu| gpu.read());
        #[cfg(not(feature = "cuda"))]
        None
    }

    /// The reading since [`begin`](Self::begin).
    pub fn read(&self) -> RankReading {
        if let Some(reading) = self.read_gpu() {
            let pools = self.rank.device.memory_pool_usage();
            let (reserved, in_use) = (pools.map(|pools| pools.bytes_reserved), pools.map(|pools| pools.bytes_in_use));
            return RankReading { reserved, in_use, ..reading };
        }
        let memory = memory::is_counting().then(|| memory::peak(self.rank.rank));
        RankReading { memory, ..RankReading::default() }
    }
}
