//! Which launches compute the gradients of the keys and values.
use crate::attention::Variant;
use crate::hopper::mma;

/// Which gradients a launch computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Gradient {
    /// Of keys and values.
    Both,
    /// Of keys only.
    Keys,
    /// Of values only.
    Values,
}

/// What is fixed when the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KeyGradientPlan {
    /// What it computes.
    pub variant: Variant,
    /// Of which inputs.
    pub gradient: Gradient,
    /// Queries per step; divides 128.
    pub block: usize,
    /// Query tiles in flight.
    pub stages: usize,
    /// The gradients of the probabilities are started before the last step's products are done. Needs more registers.
    pub early: bool,
}

impl KeyGradientPlan {
    /// The launches that were fastest on an H200 (8192 queries and keys, 32 and 8 heads) for head dimensions 64 and
    /// 128; for the others, what fits into shared memory and registers.
    pub fn fastest(variant: Variant) -> Vec<Self> {
        let plan = |gradient, block, early| Self { variant, gradient, block, stages: 2, early };
        match variant.head_dim {
            64 => vec![plan(Gradient::Both, 128, false)],
            96 | 128 => vec![plan(Gradient::Both, 64, false)],
            192 => vec![plan(Gradient::Values, 128, false), plan(Gradient::Keys, 64, false)],
            _ => vec![plan(Gradient::Values, 64, false), plan(Gradient::Keys, 32, true)],
        }
    }

    pub(super) fn keys(&self) -> bool {
        self.gradient != Gradient::Values
    }

    pub(super) fn values(&self) -> bool {
        self.gradient != Gradient::Keys
    }

    /// Pairs of a warpgroup's values in shared memory.
    pub(super) fn value_tile(&self) -> usize {
        if self.keys() { mma::ROWS * self.variant.value_width() / 2 } else { 0 }
    }

    /// Queries whose statistics come with a block. The copy engine reads from multiples of 16 bytes on, so that those
    /// of packed sequences begin up to three numbers early.
    pub fn line(&self) -> usize {
        if self.variant.packed { self.block + 4 } else { self.block }
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
