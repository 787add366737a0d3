//! The share of a data sheet's rates that training reaches.

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

/// Seconds from the start of a collective to its first byte: NCCL's order of magnitude between GPUs of a host.
pub const LATENCY: f64 = 15e-6;

/// Bytes per second from page-locked host memory to a GPU, and as many back at the same time: PCIe 5 with 16 lanes, of
/// 63 GB/s. An estimate.
pub const HOST_LINK: f64 = 50e9;

/// Shares of the peaks that training steps reach on H200s at their power limit (`bench --profile`,
/// docs/measurements.md): GEMMs of Llama 3 8B 677 of 989 TFLOP/s, copies 4.15 of 4.8 TB/s, NCCL alone 358 of 450 GB/s.
const GEMMS: f64 = 0.68;
const BANDWIDTH: f64 = 0.85;
const LINK: f64 = 0.8;
/// The same for attention, forward and backward, by head dimension: measured in training of 1B, 8B and DeepSeek-V3;
/// 96 and 256 by their ratio to 128 in kernels-cubecl/README.md.
const ATTENTION: [(usize, [f64; 2]); 5] =
    [(64, [0.41, 0.29]), (96, [0.43, 0.33]), (128, [0.54, 0.44]), (192, [0.57, 0.33]), (256, [0.61, 0.27])];
/// Speed-up of FP8 over bf16 GEMMs, without the accumulation of weight gradients: 1,285 instead of 677 TFLOP/s.
pub const FP8: f64 = 1.9;
/// Share of their rate that GEMMs keep while an NCCL kernel, which takes SMs, overlaps with them: 543 of 677
/// TFLOP/s.
pub const OVERLAPPED_GEMM_RATE: f64 = 0.8;
/// Share of a link's bandwidth that DMA copy engines reach while GEMMs run: 282 of 360 GB/s (Llama 3 8B, TP4).
pub const COPY_ENGINE_RATE: f64 = 0.78;
/// Share of a link's bandwidth that all-to-alls of MoE tokens reach with DMA copy engines: 236 to 289 of 360 GB/s
/// (Mixtral and Qwen3-MoE, EP2 and EP4).
pub const ALL_TO_ALL_RATE: f64 = 0.69;
/// Seconds that a GPU waits in an MoE layer until the host has read the token counts of the experts: 0.86 to 1.03
/// ms per layer and micro-batch, the idle time of balanced runs of Mixtral (bf16 and FP8) and Qwen3-MoE.
pub const EXPERT_COUNTS_WAIT: f64 = 0.9e-3;

/// Seconds that an expert's GEMM in FP8 takes in addition to its arithmetic. In FP8 each expert has one GEMM per
/// micro-batch, in bf16 all are one launch. From the 24,576 GEMMs in a step of Qwen3-MoE's small experts (0.603 s, in
/// bf16 0.430 s).
pub const EXPERT_GEMM_OVERHEAD: f64 = 6.8e-6;

impl Hardware {
    /// The rates that training reaches of a GPU's peaks with weights of `element` bytes, in hosts of eight.
    pub fn of(gpu: &GpuModel, element: u64) -> Self {
        let peak = gpu.peak(element);
        Self {
            model: *gpu,
            memory: (gpu.memory * 1e9) as u64,
            gemms: GEMMS * peak,
            peak,
            bandwidth: BANDWIDTH * gpu.bandwidth * 1e9,
            link: LINK * gpu.link * 1e9,
            network: LINK * gpu.network * 1e9,
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
        let known = ATTENTION.iter().find(|(most, _)| features <= *most).unwrap_or(&ATTENTION[ATTENTION.len() - 1]);
        known.1.map(|local| local / GEMMS * self.gemms)
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
