//! Where a tensor is along one axis of the mesh.

use serde::{Deserialize, Serialize};
use std::fmt;
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
            if *size == 0 || !size.is_multiple_of(ranks * self.blocks()) {
                return None;
            }
            *size /= ranks;
        }
        Some(local)
    }

    /// The dimension that is sharded.
    pub fn dim(self) -> Option<usize> {
        match self {
            Self::Shard(dim) | Self::Strided { dim, .. } => Some(dim),
            Self::Replicate | Self::Partial | Self::Varying => None,
        }
    }

    /// Whether a dimension is sharded.
    pub fn is_shard(self) -> bool {
        self.dim().is_some()
    }

    /// The blocks of the dimension that are sharded alike.
    pub fn blocks(self) -> usize {
        if let Self::Strided { blocks, .. } = self { blocks } else { 1 }
    }

    /// The same along another dimension; unchanged where none is sharded.
    pub fn along(self, dim: usize) -> Self {
        match self {
            Self::Shard(_) => Self::Shard(dim),
            Self::Strided { blocks, .. } => Self::Strided { dim, blocks },
            other => other,
        }
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Replicate => write!(f, "Replicate"),
            Self::Shard(dim) => write!(f, "Shard({dim})"),
            Self::Partial => write!(f, "Partial"),
            Self::Varying => write!(f, "Varying"),
            Self::Strided { dim, blocks } => write!(f, "Strided({dim}, {blocks})"),
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
