//! What the kernel computes and with which tiles.
use crate::attention::Variant;
use crate::hopper::mma;

/// What is fixed when the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct JointGradientPlan {
    /// What it computes.
    pub variant: Variant,
    /// Query tiles in flight.
    pub stages: usize,
}

impl JointGradientPlan {
    /// What was fastest on an H200 (8192 queries and keys, 32 and 8 heads), where there is such a kernel: for heads of
    /// 128, of whose columns each warpgroup takes half, without dropout.
    pub fn fastest(variant: Variant) -> Option<Self> {
        let Variant { head_dim, value_dim, dropout, .. } = variant;
        let fits = head_dim == D && value_dim == D && !dropout;
        fits.then_some(Self { variant, stages: 2 })
    }

    /// Queries whose statistics come with a block. The copy engine reads from multiples of 16 bytes on, so that those
    /// of packed sequences begin up to three numbers early.
    pub fn line(&self) -> usize {
        if self.variant.packed { BLOCK + 4 } else { BLOCK }
    }

    /// Numbers of one stage's statistics, a multiple of 128 bytes.
    pub(super) fn statistics(&self) -> usize {
        (2 * self.line()).next_multiple_of(32)
    }

    /// Whether queries may have to be hidden from a key that follow those it sees.
    pub(super) fn bounded(&self) -> bool {
        self.variant.window || self.variant.packed
    }
}

/// Queries per step.
pub const BLOCK: usize = 64;
/// Length of a query, key and value.
pub const D: usize = 128;
/// Pairs of a tile of a warpgroup's keys.
pub(super) const KEY_TILE: usize = mma::ROWS * D / 2;
/// Pairs of a warpgroup's part of the gradients of the scores.
pub(super) const SLOPE_TILE: usize = mma::ROWS * BLOCK / 2;
/// Places for the gradients of the scores. A warpgroup writes one three steps after the other may have started to read
/// it, and has seen since that the other came to the next step.
pub(super) const PLACES: usize = 4;
