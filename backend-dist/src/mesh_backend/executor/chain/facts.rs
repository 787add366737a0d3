//! What a chain knows of its registers, and which part of its elements a tensor has.

use burn::tensor::Shape;
use kernels_cubecl::fused::Extent;

/// What is known of a register.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fact {
    /// `None` for numbers, which fit everywhere.
    pub extent: Option<Extent>,
    /// Whether everything it was computed from, as far as it has the whole extent, is stored in half precision.
    pub is_half: bool,
    /// Whether it is a tensor of which there is a copy in half precision, or such a one after an update.
    pub has_copy: bool,
}

impl Fact {
    /// Of what is computed from both.
    pub fn with(self, other: Self) -> Self {
        use Extent::{PerColumn, PerRow, Single, Whole};
        let extent = match (self.extent, other.extent) {
            (None | Some(Single), other) | (other, None | Some(Single)) => other,
            (Some(PerRow), Some(PerRow)) => Some(PerRow),
            (Some(PerColumn), Some(PerColumn)) => Some(PerColumn),
            _ => Some(Whole),
        };
        let whole = || [self, other].into_iter().filter(|fact| fact.extent == Some(Whole));
        let is_half = match whole().count() {
            0 => self.is_half && other.is_half,
            _ => whole().all(|fact| fact.is_half),
        };
        Self { extent, is_half, has_copy: false }
    }
}

/// Rows and columns.
pub fn size(shape: &Shape) -> (usize, usize) {
    let columns = shape[..].last().copied().unwrap_or(1);
    (shape.num_elements() / columns.max(1), columns)
}

/// Which part of a matrix's elements a tensor of this shape has. In an operation whose output has as many elements as
/// the matrix, only such a tensor can have so many.
pub fn extent(shape: &Shape, (rows, columns): (usize, usize)) -> Option<Extent> {
    let (own_rows, own_columns) = size(shape);
    if (own_rows, own_columns) == (rows, columns) {
        Some(Extent::Whole)
    } else if (own_rows, own_columns) == (rows, 1) {
        Some(Extent::PerRow)
    } else if (own_rows, own_columns) == (1, columns) {
        Some(Extent::PerColumn)
    } else if own_rows * own_columns == 1 {
        Some(Extent::Single)
    } else {
        None
    }
}
