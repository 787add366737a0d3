//! The types and the sums of a grouped GEMM in FP8.
use crate::fp8::Format;
use crate::grouped::plan::{Epilogue, Gemm, GroupedPlan};
use crate::hopper::mma::Half;

/// Where a result is summed up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sums {
    /// In the tensor cores, which keep about 14 bits.
    Fast,
    /// 128 numbers of a row and a column at a time there, and these sums in fp32.
    Exact,
}

/// Which numbers of the operands share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scaling {
    /// Those of a group, and those of a matrix.
    Groups,
    /// [`BLOCK`](crate::fp8::BLOCK) consecutive numbers that are summed up, and of matrices as many rows and columns.
    Blocks,
}

/// What is fixed when the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fp8Plan {
    /// Tiles, epilogue and the type of 16-bit results; [`Gemm::Forward`] is also that of input gradients, whose matrices are
    /// transposes.
    pub base: GroupedPlan,
    /// Formats of both operands.
    pub formats: [Format; 2],
    /// Which of their numbers share a scale.
    pub scaling: Scaling,
    /// Where a result is summed up, with scales of blocks always [`Sums::Exact`].
    pub sums: Sums,
}

impl Fp8Plan {
    /// The widest tile whose sums the registers hold.
    pub fn new(
        gemm: Gemm,
        [left, right]: [Format; 2],
        (scaling, sums): (Scaling, Sums),
        base: (Half, Epilogue),
    ) -> Self {
        let (width, stages) = match (sums, scaling) {
            (Sums::Fast, _) => (256, 4),
            (Sums::Exact, Scaling::Groups) => (128, 6),
            (Sums::Exact, Scaling::Blocks) => (128, 5),
        };
        let (element, epilogue) = base;
        let base = GroupedPlan { gemm, element, epilogue, width, stages, staged: 2 };
        Self { base, formats: [left, right], scaling, sums }
    }

    /// Numbers in registers that [`Sums::Exact`] needs besides an accumulator.
    pub(super) fn totals(&self) -> usize {
        if self.sums == Sums::Exact { self.base.width / 2 } else { 1 }
    }
}
