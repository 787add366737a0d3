//! What a grouped kernel computes and with which tiles.
use super::tiles::{DEPTH, ROWS};
use crate::hopper::mma::Half;

/// Which of the products that a layer of groups needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Product {
    /// `x wᵀ`: `[rows, features]`.
    Forward,
    /// `gradient w`: `[rows, inner]`.
    InputGradient,
    /// `gradientᵀ x`, for each group: `[groups · features, inner]`.
    WeightGradient,
}

/// What becomes of the elements of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Onto {
    /// Written in the type of the inputs.
    Same,
    /// Written in fp32.
    Wide,
    /// Added to what is there, in fp32.
    Added,
}

/// What is fixed when the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupedPlan {
    /// What it computes.
    pub product: Product,
    /// Type of the inputs.
    pub element: Half,
    /// Where the result goes.
    pub onto: Onto,
    /// Columns of a tile: 128 or 256.
    pub width: usize,
    /// Tiles of inputs in flight.
    pub stages: usize,
    /// Panels of a plane's result on their way to memory.
    pub staged: usize,
    /// What the result is added to comes to the L2 cache while the cube multiplies.
    pub ahead: bool,
}

impl GroupedPlan {
    /// The widest tile, a cube on each multiprocessor.
    pub fn wide(product: Product, element: Half, onto: Onto) -> Self {
        Self { product, element, onto, width: 256, stages: 4, staged: 2, ahead: false }
    }

    /// Two cubes on each multiprocessor: one multiplies while the other writes.
    pub fn paired(product: Product, element: Half, onto: Onto) -> Self {
        Self { product, element, onto, width: 128, stages: 3, staged: 1, ahead: false }
    }

    /// The widest tile with room for all of a tile of 16 bits on its way to memory, and fewer inputs in flight.
    pub fn roomy(product: Product, element: Half, onto: Onto) -> Self {
        Self { product, element, onto, width: 256, stages: 3, staged: 4, ahead: false }
    }

    /// The widest tile, and what it is added to is brought nearer in time.
    pub fn ahead(product: Product, element: Half, onto: Onto) -> Self {
        Self { ahead: onto == Onto::Added, ..Self::wide(product, element, onto) }
    }

    /// What the library takes.
    pub fn fastest(product: Product, element: Half, onto: Onto) -> Self {
        Self::wide(product, element, onto)
    }

    /// Cubes that a multiprocessor holds.
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
        if self.onto == Onto::Same { 2 } else { 4 }
    }

    /// Columns of a panel of the result, 128 bytes.
    pub(super) fn result_panel(&self) -> usize {
        128 / self.result_bytes()
    }
}
