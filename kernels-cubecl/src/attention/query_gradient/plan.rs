//! What the kernel computes and with which tiles.
use crate::attention::Variant;

/// What is fixed when the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QueryGradientPlan {
    /// What it computes.
    pub variant: Variant,
    /// Keys per step.
    pub block: usize,
    /// Key and value tiles in flight.
    pub stages: usize,
}

impl QueryGradientPlan {
    /// What was fastest on an H200 (8192 queries and keys, 32 and 8 heads) for head dimensions 64 and 128; for the
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
