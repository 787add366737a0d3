//! Tiles of the fused kernel.
use crate::attention::Variant;
use crate::hopper::mma;

/// What is fixed when the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DqDkDvPlan {
    /// Mask, sizes and types.
    pub variant: Variant,
    /// Stages of the q and dO rings: two, which the three stages of dS count on.
    pub stages: usize,
}

impl DqDkDvPlan {
    /// The plan that was fastest on an H200 (8192 queries and keys, 32 and 8 heads). Only head_dim 64 and 128 without
    /// dropout have a fused kernel.
    pub fn fastest(variant: Variant) -> Option<Self> {
        let Variant { head_dim, value_dim, dropout, .. } = variant;
        let fits = matches!(head_dim, 64 | 128) && value_dim == head_dim && !dropout;
        fits.then_some(Self { variant, stages: 2 })
    }

    /// Queries of a q block.
    pub fn block(&self) -> usize {
        block(self.variant.head_dim)
    }

    /// Length of queries, keys and values.
    pub fn head_dim(&self) -> usize {
        self.variant.head_dim
    }

    /// Pairs of numbers in a warpgroup's K tile.
    pub(super) fn k_tile(&self) -> usize {
        mma::ROWS * self.head_dim() / 2
    }

    /// Pairs of numbers in a warpgroup's part of a dS stage.
    pub(super) fn ds_tile(&self) -> usize {
        mma::ROWS * self.block() / 2
    }

    /// How many statistics of a kind are loaded with a q block. TMA reads from multiples of 16 bytes, so those of packed
    /// sequences begin up to three numbers before the block.
    pub fn stats_width(&self) -> usize {
        if self.variant.packed { self.block() + 4 } else { self.block() }
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

/// Queries of a q block: as many as make dQ of a block two tiles of 64 × 64, one for each warpgroup. With head_dim 128
/// they are its halves by columns, with 64 by queries.
pub const fn block(head_dim: usize) -> usize {
    2 * mma::ROWS * mma::ROWS / head_dim
}

/// Stages of dS. A warpgroup writes a stage two steps after the other may have started to read it; by then it has the
/// q block that was loaded when the other had ended that read, as the rings have two stages.
pub(super) const DS_STAGES: usize = 3;
