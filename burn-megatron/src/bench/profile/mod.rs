//! The profile of a step on each GPU: a line per operation or kernel, and totals.

mod ceilings;
mod rows;
mod table;
#[cfg(test)]
mod tests;
mod totals;

use backend_dist::gpu::profile::{Kind, Profile, Source, Span};
use serde::{Deserialize, Serialize};

pub use ceilings::Ceilings;
pub use rows::{Kernel, Line};
pub use table::{csv, text};
pub use totals::{Arithmetic, Totals};

/// The profile of one GPU, per step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GpuProfile {
    /// CUDA's index.
    pub gpu: usize,
    /// By time, the longest first.
    pub rows: Vec<Line>,
    /// Sums.
    pub totals: Totals,
}

/// The profile of all GPUs of the process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProfileReport {
    /// Source of the times.
    pub source: String,
    /// Whether kernels were recorded, not only operations.
    pub kernels: bool,
    /// Steps over which is averaged.
    pub steps: usize,
    /// Milliseconds of a step.
    pub milliseconds: f64,
    /// The GPU's peak rates.
    pub ceilings: Ceilings,
    /// MHz of the SMs in the run before: below [`Ceilings::clock`] the card is held back by its power.
    pub clock: Option<f64>,
    /// In the order of their indices.
    pub gpus: Vec<GpuProfile>,
}

impl ProfileReport {
    /// Averages over `steps` steps; `clock` as in [`ProfileReport::clock`].
    pub fn new(profile: &Profile, steps: usize, ceilings: Ceilings, clock: Option<f64>) -> Self {
        let mut gpus: Vec<usize> = profile.spans.iter().map(|span| span.gpu).collect();
        gpus.sort_unstable();
        gpus.dedup();
        let one = |gpu: usize| GpuProfile {
            gpu,
            rows: rows::rows(profile, gpu, steps, &ceilings),
            totals: totals::totals(profile, gpu, steps),
        };
        let lost = match profile.dropped {
            0 => String::new(),
            count => format!(", {count} records were lost"),
        };
        let (source, kernels) = match &profile.source {
            Source::Cupti { version } => (format!("CUPTI, API version {version}{lost}"), true),
            Source::Events { why } => (format!("events around operations, without kernels: {why}"), false),
        };
        Self {
            source,
            kernels,
            steps,
            milliseconds: milliseconds(profile.window, steps),
            gpus: gpus.into_iter().map(one).collect(),
            ceilings,
            clock,
        }
    }
}

/// Of a step.
fn milliseconds(nanoseconds: u64, steps: usize) -> f64 {
    nanoseconds as f64 / 1e6 / steps.max(1) as f64
}

/// What a kernel is about: what its operation is, or by its name if none has launched it.
fn span_kind(profile: &Profile, span: &Span) -> Kind {
    if let Some(index) = span.operation {
        return profile.operations[index].operation.kind;
    }
    let kernel = span.name.to_ascii_lowercase();
    let has = |parts: &[&str]| parts.iter().any(|part| kernel.contains(part));
    match () {
        _ if has(&["nccl"]) => Kind::Collective,
        _ if has(&["gemm", "nvjet", "cutlass", "matmul"]) => Kind::Gemm,
        _ => Kind::Memory,
    }
}
