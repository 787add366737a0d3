//! Which GEMM a grouped kernel computes, and with which tiles.
use super::tiles::{DEPTH, ROWS};
use crate::hopper::mma::Half;

/// The GEMMs of a linear layer of groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Gemm {
    /// `x wᵀ`: `[rows, features]`.
    Forward,
    /// `gradient w`: `[rows, inner]`.
    InputGradient,
    /// `gradientᵀ x`, for each group: `[groups · features, inner]`.
    WeightGradient,
}

/// How the epilogue stores a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Epilogue {
    /// Written in the type of the inputs.
    InputType,
    /// The same, with the bias of the row's group times the row's factor; of [`Gemm::Forward`] only.
    Biased,
    /// Written in fp32.
    Fp32,
    /// Added to the previous numbers, in fp32.
    AddFp32,
}

/// What is fixed when the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupedPlan {
    /// The GEMM.
    pub gemm: Gemm,
    /// Type of the inputs.
    pub element: Half,
    /// How the result is stored.
    pub epilogue: Epilogue,
    /// Columns of a tile: 128, 192 or 256.
    pub width: usize,
    /// Stages of the operand ring.
    pub stages: usize,
    /// Staging panels of a plane.
    pub staged: usize,
}

impl GroupedPlan {
    /// The widest tile, one cube per SM.
    pub fn wide(gemm: Gemm, element: Half, epilogue: Epilogue) -> Self {
        Self { gemm, element, epilogue, width: 256, stages: 4, staged: 2 }
    }

    /// Tiles of three quarters of that, one cube per SM.
    pub fn narrow(gemm: Gemm, element: Half, epilogue: Epilogue) -> Self {
        Self { width: 192, ..Self::wide(gemm, element, epilogue) }
    }

    /// Two cubes per SM: one multiplies while the other stores.
    pub fn paired(gemm: Gemm, element: Half, epilogue: Epilogue) -> Self {
        Self { gemm, element, epilogue, width: 128, stages: 3, staged: 1 }
    }

    /// The widest tile with enough staging memory for a whole tile of 16 bits, and fewer stages of operands.
    pub fn wide_staging(gemm: Gemm, element: Half, epilogue: Epilogue) -> Self {
        Self { gemm, element, epilogue, width: 256, stages: 3, staged: 4 }
    }

    /// The plan that the library uses for results of this many columns: the widest tiles, unless their last column of
    /// tiles is so far past the end that narrower ones compute a twenty-fifth less (2880 columns).
    pub fn fastest(gemm: Gemm, element: Half, epilogue: Epilogue, columns: usize) -> Self {
        let (wide, narrow) = (Self::wide(gemm, element, epilogue), Self::narrow(gemm, element, epilogue));
        let computed = |plan: &Self| columns.next_multiple_of(plan.width);
        if 25 * computed(&narrow) <= 24 * computed(&wide) { narrow } else { wide }
    }

    /// Cubes that fit on an SM.
    pub(super) fn cubes(&self) -> u32 {
        if self.width == 128 { 2 } else { 1 }
    }

    /// Pairs of numbers in a tile of the left operand.
    pub(super) fn left_tile(&self) -> usize {
        ROWS * DEPTH / 2
    }

    /// Pairs of numbers in a tile of the right operand.
    pub(super) fn right_tile(&self) -> usize {
        self.width * DEPTH / 2
    }

    /// Bytes of a number of the result.
    pub(super) fn result_bytes(&self) -> usize {
        if matches!(self.epilogue, Epilogue::InputType | Epilogue::Biased) { 2 } else { 4 }
    }

    /// Columns of a panel of the result, 128 bytes.
    pub(super) fn result_panel(&self) -> usize {
        128 / self.result_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_narrow_where_that_saves_work() {
        let width = |columns| GroupedPlan::fastest(Gemm::Forward, Half::Bf16, Epilogue::InputType, columns).width;
        for (columns, expected) in [(4096, 256), (1536, 256), (5760, 256), (2880, 192), (14_336, 256), (192, 192)] {
            assert_eq!(width(columns), expected, "{columns} columns");
        }
    }
}
