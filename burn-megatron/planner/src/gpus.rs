//! The rates that training reaches on a GPU.

use layouts::gpu_model::StepRates;
pub use layouts::gpu_model::{GPUS, GpuModel, find};

/// The rates that a run reaches, per GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hardware {
    /// The GPU's data sheet.
    pub model: GpuModel,
    /// Bytes that a rank may allocate.
    pub memory: u64,
    /// FLOP/s of GEMMs.
    pub gemms: f64,
    /// Peak FLOP/s, for MFU.
    pub peak: f64,
    /// Bytes per second of memory.
    pub bandwidth: f64,
    /// Bytes per second to GPUs of the same host.
    pub link: f64,
    /// Bytes per second to other hosts.
    pub network: f64,
    /// GPUs of a host.
    pub host: usize,
    /// Data-parallel communication overlaps with passes.
    pub overlap: bool,
}

impl Hardware {
    /// The rates that training reaches of a GPU's peaks with weights of `element` bytes, in hosts of eight.
    pub fn of(gpu: &GpuModel, element: u64) -> Self {
        let peak = gpu.peak(element);
        Self {
            model: *gpu,
            memory: (gpu.memory * 1e9) as u64,
            gemms: gpu.steps.gemm * peak,
            peak,
            bandwidth: gpu.steps.bandwidth * gpu.bandwidth * 1e9,
            link: gpu.steps.link * gpu.link * 1e9,
            network: gpu.steps.link * gpu.network * 1e9,
            host: 8,
            overlap: true,
        }
    }

    /// With a measured rate of GEMMs, TFLOP/s; attention keeps its ratio to them.
    pub fn with_gemms(self, tflops: f64) -> Self {
        Self { gemms: tflops * 1e12, ..self }
    }

    /// FLOP/s of attention, forward and backward, by head dimension.
    pub fn attention(&self, features: usize) -> [f64; 2] {
        let StepRates { attention, gemm, .. } = self.model.steps;
        let known = attention.iter().find(|(most, _)| features <= *most).unwrap_or(&attention[attention.len() - 1]);
        known.1.map(|local| local / gemm * self.gemms)
    }

    /// Bytes per second between neighbours in a group of `ranks` with a stride of `stride`. Groups that span hosts
    /// share the network ports with the host's other groups.
    pub fn between(&self, ranks: usize, stride: usize) -> f64 {
        if ranks * stride <= self.host {
            return self.link;
        }
        let members = (self.host / stride.max(1)).max(1) as f64;
        self.link.min(self.network * members)
    }
}
