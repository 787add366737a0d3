//! What a chain knows of its registers, and which part of its elements a tensor has.

use burn::tensor::Shape;
use kernels_cubecl::fused::{Element, Extent, Input, Sharing, Step};

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
    /// Of a step's register, after those before it.
    pub fn of(step: Step, facts: &[Self], input: impl FnOnce(usize) -> Input) -> Self {
        let (extent, is_half) = match step {
            Step::Load(number) => {
                let Input { extent, element } = input(number);
                let extent = match extent {
                    Extent::Shared => Extent::PerColumn,
                    Extent::SharedPerRow => Extent::PerRow,
                    other => other,
                };
                (Some(extent), element == Element::Half)
            }
            Step::Scalar(_) => (None, true),
            // Zeros and ones are exact in every type.
            Step::Bernoulli(_) => (Some(Extent::Whole), true),
            Step::Unary(_, x) => (facts[x].extent, facts[x].is_half),
            Step::Binary(_, a, b) => return facts[a].with(facts[b]),
            Step::Reduce(..) => (Some(Extent::PerRow), false),
        };
        Self { extent, is_half, has_copy: false }
    }

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

/// Which part of a matrix's elements a tensor of this shape has, and which rows if they are shared. The matrix is one of
/// `[rows, columns]`, and `whole` its shape in the operation.
pub fn place(shape: &Shape, whole: &Shape, size: (usize, usize)) -> Option<(Extent, Sharing)> {
    let unshared = extent(shape, size).map(|extent| (extent, Sharing::default()));
    unshared.or_else(|| share(shape, whole, size))
}

/// Tensors of up to four dimensions whose leading ones broadcast.
fn share(shape: &Shape, whole: &Shape, (rows, columns): (usize, usize)) -> Option<(Extent, Sharing)> {
    let rank = whole.num_dims();
    let is_part = |dim: usize| shape[dim] == whole[dim] || shape[dim] == 1;
    let fits = (2..=4).contains(&rank)
        && shape.num_dims() == rank
        && (0..rank).all(is_part)
        && whole[..rank - 1].iter().product::<usize>() == rows
        && (shape[rank - 1] == 1 || shape[rank - 1] == columns);
    if !fits {
        return None;
    }
    let mut sharing = Sharing { sizes: [1; 2], strides: [0; 3] };
    let mut stride = 1;
    for (dim, place) in (0..rank - 1).rev().zip((0..3).rev()) {
        if place > 0 {
            sharing.sizes[place - 1] = u32::try_from(whole[dim]).ok()?;
        }
        if shape[dim] > 1 {
            sharing.strides[place] = u32::try_from(stride).ok()?;
            stride *= shape[dim];
        }
    }
    let extent = if shape[rank - 1] == 1 { Extent::SharedPerRow } else { Extent::Shared };
    Some((extent, sharing))
}

/// Which part of a matrix's elements a tensor of this shape has if no rows are shared. In an operation whose output has as many elements as
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
