//! The peak rates of a GPU.

use backend_dist::gpu::profile::{Kind, Precision};
use serde::{Deserialize, Serialize};

use crate::plan::gpus::GpuModel;

/// The rates that operations are compared with; `None` if the GPU is unknown.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Ceilings {
    /// FLOP/s of dense GEMMs in 8 bits.
    pub fp8: Option<f64>,
    /// FLOP/s of dense GEMMs in bf16 and f16.
    pub half: Option<f64>,
    /// FLOP/s in f32 without tensor cores.
    pub single: Option<f64>,
    /// FLOP/s in f64.
    pub double: Option<f64>,
    /// Bytes per second that a copy reads and writes.
    pub copy: Option<f64>,
    /// Bytes per second that a GPU sends to others of its host.
    pub link: Option<f64>,
    /// MHz of the SMs at which arithmetic reaches these rates.
    pub clock: Option<f64>,
    /// Source of the rates.
    pub source: String,
}

/// The clock behind the rates of H100 and H200 (SXM): 132 SMs, each 4,096 bf16 FLOPs a cycle (NVIDIA H100
/// whitepaper).
const HOPPER_CLOCK: f64 = 1830.0;

/// A copy of 8 GB on an H200, bytes read plus bytes written, in GB/s; 4,800 stand on the data sheet.
const H200_COPY: f64 = 4150.0;

impl Ceilings {
    /// Of a GPU by the name that its driver gives it.
    pub fn of(name: &str) -> Self {
        let Some(sheet) = GpuModel::named(name) else {
            return Self { source: format!("{name} is unknown"), ..Self::default() };
        };
        let (copy, measured) = match sheet.name {
            "h200" => (H200_COPY, ", copy measured"),
            _ => (sheet.bandwidth, ""),
        };
        Self {
            // Hopper, Ada and Blackwell double the rate with each halving of the type (the same data sheets).
            fp8: sheet.has_fp8().then_some(2e12 * sheet.bf16),
            half: Some(1e12 * sheet.bf16),
            single: Some(1e12 * sheet.fp32),
            double: Some(1e12 * sheet.fp64),
            copy: Some(1e9 * copy),
            link: Some(1e9 * sheet.link),
            clock: matches!(sheet.name, "h100" | "h200").then_some(HOPPER_CLOCK),
            source: format!("{}{measured}", sheet.source),
        }
    }

    /// The limit of arithmetic, FLOP/s.
    pub(super) fn arithmetic(&self, precision: Precision) -> Option<f64> {
        match precision {
            Precision::Fp8 => self.fp8,
            Precision::Half => self.half,
            Precision::Single => self.single,
            Precision::Double => self.double,
        }
    }

    /// The limit of what moves bytes, bytes per second.
    pub(super) fn bytes(&self, kind: Kind) -> Option<f64> {
        if kind == Kind::Collective { self.link } else { self.copy }
    }
}
