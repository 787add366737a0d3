//! Which slice of which global tensor a rank holds. Pure descriptions and host arithmetic, no tensors and no threads of
//! ranks.
//!
//! A *global tensor* has a name, a shape and values that do not depend on any layout. A rank's *parameter* is one local
//! array made of [`Section`]s along its first dimension, each a slice of one global tensor: a fused query-key-value
//! matrix has three. Everything that must not depend on the layout (initial values, checkpoints, gradient norms,
//! comparisons between layouts) works on sections.

mod assemble;
mod init;
mod section;
mod spec;
#[cfg(test)]
mod tests;
mod weight_source;

pub use crate::element::{HostFloats, copy_bytes};
pub use assemble::{RegistryError, assemble};
pub use init::Init;
#[doc(hidden)]
pub use section::StridedSlice;
pub use section::{GroupPosition, Section, Split};
pub use spec::{GradientSum, ParamSpec, Unit};
pub use weight_source::WeightSource;

use serde::{Deserialize, Serialize};
use std::ops::Range;

/// A hash of a name that is the same on every machine and in every version: 64-bit FNV-1a
/// (Fowler, Noll, Vo; <http://www.isthe.com/chongo/tech/comp/fnv/>).
pub fn stable_hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// A global tensor on the host: row-major values, wide enough for every float type.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HostTensor {
    /// Size of every dimension.
    pub shape: Vec<usize>,
    /// The product of the shape values, last dimension fastest.
    pub data: Vec<f64>,
}

impl HostTensor {
    /// The values inside `ranges`, one range per dimension, row-major.
    ///
    /// # Panics
    /// If there are more or fewer ranges than dimensions, or one reaches beyond its dimension.
    pub fn read_box(&self, ranges: &[Range<usize>]) -> Vec<f64> {
        assert_eq!(ranges.len(), self.shape.len(), "one range per dimension of {:?}", self.shape);
        let Some((last, outer)) = ranges.split_last() else { return self.data.clone() };
        let mut starts = vec![0];
        for (range, size) in outer.iter().zip(&self.shape) {
            starts = starts.iter().flat_map(|start| range.clone().map(move |index| start * size + index)).collect();
        }
        let row = self.shape[self.shape.len() - 1];
        starts.iter().flat_map(|start| &self.data[start * row + last.start..start * row + last.end]).copied().collect()
    }
}
