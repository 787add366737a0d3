//! Rates of common GPUs by their vendor's data sheets, and the share of them that training reaches.

/// A GPU by its data sheet: dense rates without sparsity, decimal gigabytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gpu {
    /// Its name on the command line.
    pub name: &'static str,
    /// TFLOP/s of bf16 GEMMs.
    pub bf16: f64,
    /// TFLOP/s in fp32 without tensor cores.
    pub fp32: f64,
    /// TFLOP/s in fp64.
    pub fp64: f64,
    /// Memory in GB.
    pub memory: f64,
    /// Memory bandwidth in GB/s.
    pub bandwidth: f64,
    /// Bandwidth to the other GPUs of the host, in GB/s and one direction.
    pub link: f64,
    /// Bandwidth to other hosts, in GB/s, one direction and per GPU.
    pub network: f64,
    /// The source of the numbers.
    pub source: &'static str,
}

const fn gpu(name: &'static str, rates: [f64; 3], memory: [f64; 2], links: [f64; 2], source: &'static str) -> Gpu {
    let ([bf16, fp32, fp64], [memory, bandwidth], [link, network]) = (rates, memory, links);
    Gpu { name, bf16, fp32, fp64, memory, bandwidth, link, network, source }
}

/// The known GPUs. Networks are those of the vendor's reference hosts: a 400 Gbit/s port per H100, H200 and B200, 200
/// Gbit/s per A100; for PCIe cards an eighth of that host's one port.
pub const GPUS: &[Gpu] = &[
    gpu("h100", [989.4, 66.9, 33.5], [80.0, 3350.0], [450.0, 50.0], "NVIDIA H100 data sheet, SXM5"),
    gpu("h100-pcie", [756.0, 51.2, 25.6], [80.0, 2039.0], [64.0, 25.0], "NVIDIA H100 data sheet, PCIe"),
    gpu("h200", [989.4, 66.9, 33.5], [141.0, 4800.0], [450.0, 50.0], "NVIDIA H200 data sheet, SXM"),
    gpu("b200", [2250.0, 75.0, 37.0], [180.0, 7700.0], [900.0, 50.0], "NVIDIA HGX B200 data sheet, per GPU"),
    gpu("a100-80gb", [312.0, 19.5, 9.7], [80.0, 2039.0], [300.0, 25.0], "NVIDIA A100 data sheet, SXM 80 GB"),
    gpu("a100-40gb", [312.0, 19.5, 9.7], [40.0, 1555.0], [300.0, 25.0], "NVIDIA A100 data sheet, SXM 40 GB"),
    gpu("l40s", [362.0, 91.6, 1.4], [48.0, 864.0], [32.0, 12.5], "NVIDIA L40S data sheet"),
    gpu(
        "rtx-4090",
        [165.2, 82.6, 1.3],
        [24.0, 1008.0],
        [32.0, 3.0],
        "NVIDIA Ada GPU architecture whitepaper, appendix A",
    ),
];

/// The GPU of a name.
///
/// # Errors
/// Names all GPUs.
pub fn find(name: &str) -> Result<&'static Gpu, String> {
    let names: Vec<&str> = GPUS.iter().map(|gpu| gpu.name).collect();
    let known = GPUS.iter().find(|gpu| gpu.name.eq_ignore_ascii_case(name));
    known.ok_or_else(|| {
        format!("GPU `{name}` is unknown; legal: {}; or --memory, --tflops, --bandwidth and --link", names.join(", "))
    })
}

impl Gpu {
    /// The data sheet of a GPU by the name that its driver gives it, for example `NVIDIA H200`.
    pub fn named(name: &str) -> Option<&'static Self> {
        let name = name.to_ascii_uppercase();
        let has = |part: &str| name.contains(part);
        let known = match () {
            _ if has("H200") => "h200",
            _ if has("H100") && has("PCIE") => "h100-pcie",
            _ if has("H100") && !has("NVL") => "h100",
            _ if has("B200") && !has("GB200") => "b200",
            _ if has("A100") && has("80GB") => "a100-80gb",
            _ if has("A100") => "a100-40gb",
            _ if has("L40S") => "l40s",
            _ if has("RTX 4090") => "rtx-4090",
            _ => return None,
        };
        GPUS.iter().find(|gpu| gpu.name == known)
    }

    /// Whether its tensor cores have FP8: compute capability 8.9 or more.
    pub fn has_fp8(&self) -> bool {
        !self.name.starts_with("a100")
    }

    /// FLOP/s of dense GEMMs with weights of `element` bytes.
    pub fn peak(&self, element: u64) -> f64 {
        1e12 * match element {
            8 => self.fp64,
            4 => self.fp32,
            _ => self.bf16,
        }
    }
}

/// The rates that a run reaches, per GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hardware {
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
    pub fn of(gpu: &Gpu, element: u64) -> Self {
        let peak = gpu.peak(element);
        Self {
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
