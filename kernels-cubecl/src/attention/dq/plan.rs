//! Tiles of the dQ kernel.
use crate::attention::Variant;

/// What is fixed when the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DqPlan {
    /// Mask, sizes and types.
    pub variant: Variant,
    /// Keys of a kv block.
    pub block: usize,
    /// Stages of the K and V rings.
    pub stages: usize,
}

impl DqPlan {
    /// The plan that was fastest on an H200 (8192 queries and keys, 32 and 8 heads) for head_dim 64 and 128; for the
    /// others, what fits into shared memory and registers.
    pub fn fastest(variant: Variant) -> Self {
        let block = match variant.head_dim {
            64..=128 => 112,
            192 => 80,
            _ => 48,
        };
        Self { variant, block, stages: 2 }
    }
}
