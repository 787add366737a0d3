//! The launches for dK and dV.
use crate::attention::Variant;
use crate::hopper::mma;

/// The gradients that a launch computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DkDvOutputs {
    /// dK and dV.
    Both,
    /// dK only.
    Dk,
    /// dV only.
    Dv,
}

/// What is fixed when the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DkDvPlan {
    /// Mask, sizes and types.
    pub variant: Variant,
    /// The gradients it computes.
    pub outputs: DkDvOutputs,
    /// Queries of a q block; divides 128.
    pub block: usize,
    /// Stages of the q and dO rings.
    pub stages: usize,
    /// Issue the GEMM for dP before the last step's GEMMs are done. Needs more registers.
    pub early_dp: bool,
}

impl DkDvPlan {
    /// The launches that were fastest on an H200 (8192 queries and keys, 32 and 8 heads) for head_dim 64 and 128; for
    /// the others, what fits into shared memory and registers.
    pub fn fastest(variant: Variant) -> Vec<Self> {
        let plan = |outputs, block, early_dp| Self { variant, outputs, block, stages: 2, early_dp };
        match variant.head_dim {
            64 => vec![plan(DkDvOutputs::Both, 128, false)],
            96 | 128 => vec![plan(DkDvOutputs::Both, 64, false)],
            192 => vec![plan(DkDvOutputs::Dv, 128, false), plan(DkDvOutputs::Dk, 64, false)],
            _ => vec![plan(DkDvOutputs::Dv, 64, false), plan(DkDvOutputs::Dk, 32, true)],
        }
    }

    pub(super) fn has_dk(&self) -> bool {
        self.outputs != DkDvOutputs::Dv
    }

    pub(super) fn has_dv(&self) -> bool {
        self.outputs != DkDvOutputs::Dk
    }

    /// Pairs of numbers in a warpgroup's V tile.
    pub(super) fn v_tile(&self) -> usize {
        if self.has_dk() { mma::ROWS * self.variant.value_width() / 2 } else { 0 }
    }

    /// How many statistics of a kind are loaded with a q block. TMA reads from multiples of 16 bytes, so those of packed
    /// sequences begin up to three numbers before the block.
    pub fn stats_width(&self) -> usize {
        if self.variant.packed { self.block + 4 } else { self.block }
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
