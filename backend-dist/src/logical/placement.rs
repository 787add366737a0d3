//! Where a tensor is along one axis of the mesh.

use super::parts::Parts;
use burn::tensor::Slice;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// Where a tensor is along one axis of the mesh. The names are those of PyTorch's `DTensor`.
///
/// ```
/// use backend_dist::logical::Placement;
///
/// assert_eq!("Shard(1)".parse(), Ok(Placement::Shard(1)));
/// assert_eq!(Placement::Shard(1).local_shape(&[4, 6], 2), Some(vec![4, 3]));
/// assert_eq!(Placement::Shard(1).local_shape(&[4, 6], 4), None);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Placement {
    /// Every rank of the axis holds the whole tensor.
    #[default]
    Replicate,
    /// Rank `i` of `n` holds the `i`-th of `n` equal blocks along this dimension.
    Shard(
        /// The dimension.
        usize,
    ),
    /// Every rank holds a summand of the tensor.
    Partial,
    /// As [`Shard`](Self::Shard) within each of `blocks` equal blocks of the dimension. A reshape makes this where it
    /// merges a sharded dimension with one before it.
    Strided {
        /// The dimension.
        dim: usize,
        /// Number of blocks.
        blocks: usize,
    },
    /// As [`Shard`](Self::Shard) within each of several parts of different sizes: see [`in_parts`](Self::in_parts).
    Parts {
        /// The dimension.
        dim: usize,
        /// Their sizes, in proportion.
        parts: Parts,
    },
    /// Every rank holds a tensor of its own of this shape: see [`to_local`](crate::local::to_local).
    Varying,
}

impl Placement {
    /// Shape of what one of `ranks` ranks holds of a tensor of shape `shape`; `None` if the tensor has no such
    /// dimension, or `ranks` does not divide it.
    pub fn local_shape(self, shape: &[usize], ranks: usize) -> Option<Vec<usize>> {
        let mut local = shape.to_vec();
        if let Some(dim) = self.dim() {
            let size = local.get_mut(dim)?;
            let divides = |parts: Vec<usize>| parts.iter().all(|part| part.is_multiple_of(ranks));
            if *size == 0 || !self.part_sizes(*size).is_some_and(divides) {
                return None;
            }
            *size /= ranks;
        }
        Some(local)
    }

    /// The dimension that is sharded.
    pub fn dim(self) -> Option<usize> {
        match self {
            Self::Shard(dim) | Self::Strided { dim, .. } | Self::Parts { dim, .. } => Some(dim),
            Self::Replicate | Self::Partial | Self::Varying => None,
        }
    }

    /// Whether a dimension is sharded.
    pub fn is_shard(self) -> bool {
        self.dim().is_some()
    }

    /// The equal blocks of the dimension that are sharded alike.
    pub fn blocks(self) -> usize {
        if let Self::Strided { blocks, .. } = self { blocks } else { 1 }
    }

    /// The same along another dimension; unchanged where none is sharded.
    pub fn along(self, dim: usize) -> Self {
        match self {
            Self::Shard(_) => Self::Shard(dim),
            Self::Strided { blocks, .. } => Self::Strided { dim, blocks },
            Self::Parts { parts, .. } => Self::Parts { dim, parts },
            other => other,
        }
    }

    /// As [`Shard`](Self::Shard) within each of these parts of the dimension; `None` if there are none, an empty one, or more
    /// than eight of different sizes.
    ///
    /// ```
    /// use backend_dist::logical::Placement;
    ///
    /// // Four queries share a key and a value.
    /// let qkv = Placement::in_parts(1, &[16, 4, 4]).unwrap();
    /// assert_eq!((qkv.local_shape(&[8, 24], 2), qkv.local_shape(&[8, 24], 8)), (Some(vec![8, 12]), None));
    /// assert_eq!(qkv.taken(16..20, 24), Some(Placement::Shard(1)));
    /// assert_eq!(qkv.taken(16..24, 24), Some(Placement::Strided { dim: 1, blocks: 2 }));
    /// assert_eq!(qkv.taken(12..16, 24), None);
    /// ```
    pub fn in_parts(dim: usize, sizes: &[usize]) -> Option<Self> {
        match sizes {
            [] => None,
            _ if sizes.contains(&0) => None,
            [_] => Some(Self::Shard(dim)),
            [first, ..] if sizes.iter().all(|size| size == first) => Some(Self::Strided { dim, blocks: sizes.len() }),
            _ => Parts::new(sizes).map(|parts| Self::Parts { dim, parts }),
        }
    }

    /// Whether a dimension is sharded in parts.
    pub fn is_in_parts(self) -> bool {
        matches!(self, Self::Strided { .. } | Self::Parts { .. })
    }

    /// The sizes of what is sharded alike of a dimension of `size` elements, or of a rank's share of that; `None` if there
    /// are no such parts of it.
    pub fn part_sizes(self, size: usize) -> Option<Vec<usize>> {
        match self {
            Self::Shard(_) => Some(vec![size]),
            Self::Strided { blocks, .. } => size.is_multiple_of(blocks).then(|| vec![size / blocks; blocks]),
            Self::Parts { parts, .. } => parts.sizes(size),
            Self::Replicate | Self::Partial | Self::Varying => None,
        }
    }

    /// Where this range of the dimension, of `size` elements, is: `None` if it begins or ends within a part.
    pub fn taken(self, range: Range<usize>, size: usize) -> Option<Self> {
        let (mut end, mut taken) = (0, Vec::new());
        for part in self.part_sizes(size)? {
            end += part;
            if range.contains(&(end - part)) && end <= range.end {
                taken.push(part);
            }
        }
        let at = Self::in_parts(self.dim()?, &taken)?;
        (taken.iter().sum::<usize>() == range.len()).then_some(at)
    }

    /// Where a slice of a tensor of this shape is; `None` if it begins or ends within a part, or takes only some elements of
    /// it.
    pub(crate) fn sliced(self, shape: &[usize], ranges: &[Slice]) -> Option<Self> {
        let dim = self.dim()?;
        match ranges.get(dim) {
            None => Some(self),
            Some(range) => self.taken(bounds(range, shape[dim])?, shape[dim]),
        }
    }
}

/// What `range` takes of `size` elements, if it takes them one after the other.
fn bounds(range: &Slice, size: usize) -> Option<Range<usize>> {
    let start = usize::try_from(range.start).ok()?;
    let end = usize::try_from(range.end.unwrap_or(size as isize)).ok()?;
    (range.step == 1 && end <= size).then_some(start..end)
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Replicate => write!(f, "Replicate"),
            Self::Shard(dim) => write!(f, "Shard({dim})"),
            Self::Partial => write!(f, "Partial"),
            Self::Varying => write!(f, "Varying"),
            Self::Strided { dim, blocks } => write!(f, "Strided({dim}, {blocks})"),
            Self::Parts { dim, parts } => write!(f, "Parts({dim}, {parts})"),
        }
    }
}

/// A text that names no placement.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("placement `{0}` is none of `Replicate`, `Shard(dimension)`, `Partial`")]
pub struct ParsePlacementError(String);

impl FromStr for Placement {
    type Err = ParsePlacementError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let shard = |text: &str| text.strip_prefix("Shard(")?.strip_suffix(')')?.trim().parse().ok();
        match text.trim() {
            "Replicate" => Ok(Self::Replicate),
            "Partial" => Ok(Self::Partial),
            text => shard(text).map(Self::Shard).ok_or_else(|| ParsePlacementError(text.to_string())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Placement::{self, Shard, Strided};
    use super::*;

    #[test]
    fn proportions_are_what_counts() {
        let at = |sizes: &[usize]| Placement::in_parts(2, sizes);
        assert_eq!(at(&[8, 8, 2, 2, 1]), at(&[64, 64, 16, 16, 8]));
        assert_eq!((at(&[6, 6, 6]), at(&[6])), (Some(Strided { dim: 2, blocks: 3 }), Some(Shard(2))));
        assert_eq!((at(&[]), at(&[4, 0]), at(&[1, 2, 3, 4, 5, 6, 7, 8, 9])), (None, None, None));
        let parts = at(&[4, 2, 2]).unwrap();
        assert_eq!((parts.part_sizes(16), parts.part_sizes(18)), (Some(vec![8, 4, 4]), None));
        assert_eq!(
            (parts.along(0).dim(), parts.is_shard(), parts.to_string()),
            (Some(0), true, "Parts(2, 2:1:1)".into())
        );
    }

    #[test]
    fn a_range_of_whole_parts_is_sharded_in_those() {
        let parts = Placement::in_parts(0, &[8, 4, 4, 2]).unwrap();
        let taken = |range| parts.taken(range, 18);
        assert_eq!(
            (taken(0..18), taken(0..8), taken(8..16)),
            (Some(parts), Some(Shard(0)), Placement::in_parts(0, &[4, 4]))
        );
        assert_eq!((taken(0..9), taken(4..12), taken(16..16), taken(8..20)), (None, None, None, None));
        assert_eq!((Shard(0).taken(0..6, 6), Shard(0).taken(0..3, 6)), (Some(Shard(0)), None));
        let sliced = |range: Slice| parts.sliced(&[18, 5], &[range]);
        assert_eq!((sliced(Slice::from(8..12)), sliced(Slice::new(8, Some(12), 2))), (Some(Shard(0)), None));
        assert_eq!(sliced(Slice::new(-2, None, 1)), None);
    }
}
