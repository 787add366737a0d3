//! GPUs by their data sheets, and what work reaches of them: one description for the planner and for decisions at run
//! time.

mod rates;

pub use rates::{OperationRates, StepRates};

/// The first compute capability with FP8 tensor cores (Ada; Hopper is 9.0).
pub const FP8: (u32, u32) = (8, 9);
/// That of GPUs whose FP8 GEMMs take a scale for each block: cuBLASLt has them on Hopper alone.
pub const FP8_BLOCKS: (u32, u32) = (9, 0);

/// A GPU by its data sheet: dense rates without sparsity, decimal gigabytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GpuModel {
    /// Its name on the command line.
    pub name: &'static str,
    /// Compute capability, for example `(9, 0)`.
    pub capability: (u32, u32),
    /// Number of SMs.
    pub sms: usize,
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
    /// What single operations reach of these rates.
    pub operations: OperationRates,
    /// What training steps reach of them.
    pub steps: StepRates,
    /// The source of the numbers.
    pub source: &'static str,
}

const fn gpu(
    name: &'static str,
    (capability, sms): ((u32, u32), usize),
    rates: [f64; 3],
    memory: [f64; 2],
    links: [f64; 2],
    source: &'static str,
) -> GpuModel {
    let ([bf16, fp32, fp64], [memory, bandwidth], [link, network]) = (rates, memory, links);
    let (operations, steps) = (rates::OPERATIONS, rates::STEPS);
    GpuModel { name, capability, sms, bf16, fp32, fp64, memory, bandwidth, link, network, operations, steps, source }
}

/// The known GPUs. Networks are those of the vendor's reference hosts: a 400 Gbit/s port per H100, H200 and B200, 200
/// Gbit/s per A100; for PCIe cards an eighth of that host's one port.
pub static GPUS: [GpuModel; 8] = [
    gpu("h100", ((9, 0), 132), [989.4, 66.9, 33.5], [80.0, 3350.0], [450.0, 50.0], "NVIDIA H100 data sheet, SXM5"),
    gpu("h100-pcie", ((9, 0), 114), [756.0, 51.2, 25.6], [80.0, 2039.0], [64.0, 25.0], "NVIDIA H100 data sheet, PCIe"),
    gpu("h200", ((9, 0), 132), [989.4, 66.9, 33.5], [141.0, 4800.0], [450.0, 50.0], "NVIDIA H200 data sheet, SXM"),
    gpu(
        "b200",
        ((10, 0), 148),
        [2250.0, 75.0, 37.0],
        [180.0, 7700.0],
        [900.0, 50.0],
        "NVIDIA HGX B200 data sheet, per GPU",
    ),
    gpu(
        "a100-80gb",
        ((8, 0), 108),
        [312.0, 19.5, 9.7],
        [80.0, 2039.0],
        [300.0, 25.0],
        "NVIDIA A100 data sheet, SXM 80 GB",
    ),
    gpu(
        "a100-40gb",
        ((8, 0), 108),
        [312.0, 19.5, 9.7],
        [40.0, 1555.0],
        [300.0, 25.0],
        "NVIDIA A100 data sheet, SXM 40 GB",
    ),
    gpu("l40s", ((8, 9), 142), [362.0, 91.6, 1.4], [48.0, 864.0], [32.0, 12.5], "NVIDIA L40S data sheet"),
    gpu(
        "rtx-4090",
        ((8, 9), 128),
        [165.2, 82.6, 1.3],
        [24.0, 1008.0],
        [32.0, 3.0],
        "NVIDIA Ada GPU architecture whitepaper, appendix A",
    ),
];

/// The GPU of a name on the command line.
///
/// # Errors
/// Names all GPUs.
pub fn find(name: &str) -> Result<&'static GpuModel, String> {
    let names: Vec<&str> = GPUS.iter().map(|gpu| gpu.name).collect();
    let known = GPUS.iter().find(|gpu| gpu.name.eq_ignore_ascii_case(name));
    known.ok_or_else(|| {
        format!("GPU `{name}` is unknown; legal: {}; or --memory, --tflops, --bandwidth and --link", names.join(", "))
    })
}

impl GpuModel {
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

    /// An estimate of a GPU without a data sheet here, by its compute capability, number of SMs and bytes of memory: the
    /// rates of the latest architecture up to its own, in proportion to the number of SMs.
    pub fn estimate(capability: (u32, u32), sms: usize, memory: u64) -> Self {
        let earlier = GPUS.iter().filter(|known| known.capability <= capability);
        let alike = |known: &&Self| (known.capability, usize::MAX - known.sms.abs_diff(sms));
        let near = earlier.max_by_key(alike).unwrap_or(&GPUS[4]);
        let share = sms as f64 / near.sms as f64;
        Self {
            name: "unknown",
            capability,
            sms,
            bf16: share * near.bf16,
            fp32: share * near.fp32,
            fp64: share * near.fp64,
            memory: memory as f64 / 1e9,
            source: "an estimate from a GPU of the same architecture",
            ..*near
        }
    }

    /// Whether its tensor cores have FP8.
    pub fn has_fp8(&self) -> bool {
        self.capability >= FP8
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_gpus_have_their_data_sheet() {
        assert_eq!(GpuModel::named("NVIDIA H200"), find("h200").ok());
        assert_eq!(GpuModel::named("NVIDIA H100 80GB HBM3").unwrap().name, "h100");
        assert_eq!(GpuModel::named("NVIDIA R300"), None);
        assert_eq!(GPUS.iter().filter(|gpu| !gpu.has_fp8()).count(), 2, "the A100s");
    }

    #[test]
    fn unknown_gpus_are_like_the_nearest_of_their_architecture() {
        // Half of an H100, by SMs; its links are those of the card that it is nearest to.
        let half = GpuModel::estimate((9, 0), 66, 96_000_000_000);
        assert_eq!((half.name, half.sms, half.memory), ("unknown", 66, 96.0));
        assert!((half.bf16 / 756.0 - 66.0 / 114.0).abs() < 1e-9 && half.link == 64.0, "{half:?}");
        // Later than all that are known, and earlier.
        assert_eq!(GpuModel::estimate((12, 1), 148, 96_000_000_000).bf16, 2250.0);
        assert!(!GpuModel::estimate((7, 0), 80, 96_000_000_000).has_fp8());
    }
}
