//! Tiles and schedule of the forward kernel.
use crate::attention::Variant;

/// What is fixed when the forward kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ForwardPlan {
    /// Mask, sizes and types.
    pub variant: Variant,
    /// Keys of a kv block.
    pub block: usize,
    /// Stages of the K and V rings.
    pub stages: usize,
    /// Overlap within a warpgroup: P V of the previous kv block runs under the softmax of this one.
    pub intra_wg_overlap: bool,
    /// Ping-pong: the two warpgroups take turns at the tensor cores, so that one computes its softmax while the other
    /// multiplies.
    pub ping_pong: bool,
}

impl ForwardPlan {
    /// The plan that was fastest on an H200 (8192 queries and keys, 32 and 8 heads) for head_dim 64 and 128; for the
    /// others, what fits into shared memory and registers.
    pub fn fastest(variant: Variant) -> Self {
        let (block, pipelined) = match variant.head_dim {
            // Small enough for two cubes on an SM.
            64 => (80, false),
            // The dropout hash needs registers too.
            96 | 128 if variant.dropout => (112, true),
            96 => (160, true),
            128 if variant.causal || variant.window => (160, true),
            128 => (176, true),
            192 => (128, true),
            _ => (80, true),
        };
        Self { variant, block, stages: 2, intra_wg_overlap: pipelined, ping_pong: pipelined }
    }
}
