//! Tiles of the fused kernel.
use crate::attention::Variant;
use crate::hopper::mma;

/// What is fixed when the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DqDkDvPlan {
    /// Mask, sizes and types.
    pub variant: Variant,
    /// Stages of the q and dO rings.
    pub stages: usize,
}

impl DqDkDvPlan {
    /// The plan that was fastest on an H200 (8192 queries and keys, 32 and 8 heads). Only head_dim 128 without dropout
    /// has a fused kernel; each warpgroup computes half of the columns of dQ.
    pub fn fastest(variant: Variant) -> Option<Self> {
        let Variant { head_dim, value_dim, dropout, .. } = variant;
        let fits = head_dim == D && value_dim == D && !dropout;
        fits.then_some(Self { variant, stages: 2 })
    }

    /// StatsRing that are loaded with a q block. TMA reads from multiples of 16 bytes, so those of packed sequences
    /// begin up to three numbers before the block.
    pub fn stats_width(&self) -> usize {
        if self.variant.packed { BLOCK + 4 } else { BLOCK }
    }

    /// Numbers of one stage's statistics, a multiple of 128 bytes.
    pub(super) fn stats_len(&self) -> usize {
        (2 * self.stats_width()).next_multiple_of(32)
    }

    /// Whether the scores of queries past the last one that sees a key may have to be masked.
    pub(super) fn bounded(&self) -> bool {
        self.variant.window || self.variant.packed
    }
}

/// Queries of a q block.
pub const BLOCK: usize = 64;
/// Head dimension.
pub const D: usize = 128;
/// Pairs of numbers in a warpgroup's K tile.
pub(super) const K_TILE: usize = mma::ROWS * D / 2;
/// Pairs of numbers in a warpgroup's part of a dS stage.
pub(super) const DS_TILE: usize = mma::ROWS * BLOCK / 2;
/// Stages of dS. A warpgroup writes a stage three steps after the other may have started to read it; by then it has
/// waited for the dS that the other wrote one step later.
pub(super) const DS_STAGES: usize = 4;
