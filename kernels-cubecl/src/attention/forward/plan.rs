//! What the forward kernel computes and with which tiles.
use crate::attention::Variant;

/// What is fixed when the forward kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ForwardPlan {
    /// What it computes.
    pub variant: Variant,
    /// Keys per step.
    pub block: usize,
    /// Key and value tiles in flight.
    pub stages: usize,
    /// The product with the values runs under the exponentials of the next scores.
    pub overlap: bool,
    /// The two warpgroups take turns at the tensor cores, so that one computes exponentials while the other multiplies.
    pub turns: bool,
}

impl ForwardPlan {
    /// What was fastest on an H200 (8192 queries and keys, 32 and 8 heads) for head dimensions 64 and 128; for the
    /// others, what fits into shared memory and registers.
    pub fn fastest(variant: Variant) -> Self {
        let (block, pipelined) = match variant.head_dim {
            // Small enough for two cubes on a multiprocessor.
            64 => (80, false),
            // The draws need registers too.
            96 | 128 if variant.dropout => (112, true),
            96 => (160, true),
            128 if variant.causal || variant.window => (160, true),
            128 => (176, true),
            192 => (128, true),
            _ => (80, true),
        };
        Self { variant, block, stages: 2, overlap: pipelined, turns: pipelined }
    }
}
