//! What work reaches of a data sheet's rates, measured on H200s of one host. Other GPUs are taken to reach the same
//! shares until somebody has measured them.

/// What single operations reach: for decisions at run time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OperationRates {
    /// Share of `bf16` that 16-bit GEMMs reach, roughly: cuBLASLt on Hopper, 650 of 989 TFLOP/s.
    pub gemm: f64,
    /// Share of a link's bandwidth that NCCL reaches without overlap: 280 of 450 GB/s over NVLink 4.
    pub nccl: f64,
    /// The same, overlapped with GEMMs, on two H200s.
    pub overlapped_nccl: f64,
    /// Share of a link's bandwidth at which a GPU copies from its peers by DMA while GEMMs run: 265 of 450 GB/s on four
    /// H200s.
    pub copy: f64,
    /// Share of the memory bandwidth that a sum of shards reaches: 3.6 of 4.8 TB/s on an H200.
    pub sum: f64,
    /// Latency of a collective in seconds.
    pub collective_latency: f64,
    /// Latency of a copy in seconds.
    pub copy_latency: f64,
    /// Seconds until the ranks of a group are signalled about each other's shards.
    pub signal_latency: f64,
}

/// What training steps reach at the power limit (`bench --profile`, docs/measurements.md): for the planner.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepRates {
    /// GEMMs of Llama 3 8B: 677 of 989 TFLOP/s.
    pub gemm: f64,
    /// Copies: 4.15 of 4.8 TB/s.
    pub bandwidth: f64,
    /// NCCL alone: 358 of 450 GB/s.
    pub link: f64,
    /// Share of the peak that attention reaches, forward and backward, by head dimension: measured in training of 1B, 8B
    /// and DeepSeek-V3; 96 and 256 by their ratio to 128 in kernels-cubecl/README.md.
    pub attention: [(usize, [f64; 2]); 5],
    /// Speed-up of FP8 over bf16 GEMMs, without the accumulation of weight gradients: 1,285 instead of 677 TFLOP/s.
    pub fp8: f64,
    /// The same with a scale for each block: 325 instead of 263 ms in a step (Llama 3 8B with 16 layers).
    pub fp8_blocks: f64,
    /// Share of their rate that GEMMs keep while an NCCL kernel, which takes SMs, overlaps with them: 543 of 677
    /// TFLOP/s.
    pub overlapped_gemm: f64,
    /// Share of NCCL's bandwidth that DMA copy engines reach while GEMMs run: 282 of 360 GB/s (Llama 3 8B, TP4).
    pub dma_copy: f64,
    /// Share of NCCL's bandwidth that all-to-alls of MoE tokens reach with DMA copy engines: 236 to 289 of 360 GB/s
    /// (Mixtral and Qwen3-MoE, EP2 and EP4).
    pub all_to_all: f64,
    /// Seconds from the start of a collective to its first byte: NCCL's order of magnitude between GPUs of a host.
    pub latency: f64,
    /// Seconds that a GPU waits in an MoE layer until the host has read the token counts of the experts: 0.86 to 1.03
    /// ms per layer and micro-batch, the idle time of balanced runs of Mixtral (bf16 and FP8) and Qwen3-MoE.
    pub expert_counts_wait: f64,
    /// Bytes per second from page-locked host memory to a GPU, and as many back at the same time: PCIe 5 with 16 lanes,
    /// of 63 GB/s. An estimate.
    pub host_link: f64,
}

/// On H200s of one host.
pub(super) const OPERATIONS: OperationRates = OperationRates {
    gemm: 650.0 / 989.4,
    nccl: 280.0 / 450.0,
    overlapped_nccl: 160.0 / 450.0,
    copy: 265.0 / 450.0,
    sum: 3.6 / 4.8,
    collective_latency: 10e-6,
    copy_latency: 10e-6,
    signal_latency: 25e-6,
};

/// On H200s of one host.
pub(super) const STEPS: StepRates = StepRates {
    gemm: 0.68,
    bandwidth: 0.85,
    link: 0.8,
    attention: [(64, [0.41, 0.29]), (96, [0.43, 0.33]), (128, [0.54, 0.44]), (192, [0.57, 0.33]), (256, [0.61, 0.27])],
    fp8: 1.9,
    fp8_blocks: 1.54,
    overlapped_gemm: 0.8,
    dma_copy: 0.78,
    all_to_all: 0.69,
    latency: 15e-6,
    expert_counts_wait: 0.9e-3,
    host_link: 50e9,
};
