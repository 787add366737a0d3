//! Moments that are saved in 8 bits.

use std::ops::Range;

use kernels_cubecl::narrow::dynamic::{BLOCK, Map};
use safetensors::Dtype;

use super::super::error::{CheckpointError, Result};
use super::super::names::MANIFEST;
use super::super::{Kind, boxes};
use super::Checkpoint;

impl Checkpoint {
    /// A box of a moment that is stored in 8 bits, as numbers; `None` of other tensors.
    pub(super) fn decoded(
        &self,
        kind: Kind,
        name: &str,
        shape: &[usize],
        ranges: &[Range<usize>],
    ) -> Result<Option<Vec<f32>>> {
        let Some(of_scales) = kind.scales() else { return Ok(None) };
        let located = self.locate(kind, name, shape, ranges)?;
        if self.tensors()[located.index].dtype != Dtype::U8 {
            return Ok(None);
        }
        if self.tensor(of_scales, name).is_none() {
            let what = format!(
                "holds `{kind}/{name}` in U8, but no `{of_scales}/{name}`; the checkpoint is damaged, restore it"
            );
            return Err(CheckpointError::file(&self.path.join(MANIFEST), what));
        }
        let map = if kind == Kind::FirstMoment { Map::Signed } else { Map::Unsigned };
        let (codes, scales) = (self.stored(located, ranges)?, self.scales(of_scales, name, shape, ranges)?);
        Ok(Some(codes.into_iter().zip(scales).map(|(code, scale)| map.number(code, scale)).collect()))
    }

    /// The scales of a box of a moment of this shape, one for each element; zeros where the moment is not in 8 bits.
    ///
    /// # Panics
    /// If `ranges` is not inside `shape`.
    #[doc(hidden)]
    pub fn scales(&self, kind: Kind, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<Vec<f32>> {
        let Some(saved) = self.tensor(kind, name) else { return Ok(vec![0.0; boxes::len(ranges)]) };
        if saved.dtype != Dtype::F32 {
            let what = format!("holds `{kind}/{name}` in {}; scales are F32", saved.dtype);
            return Err(CheckpointError::file(&self.path.join(MANIFEST), what));
        }
        if saved.global_shape == shape {
            return self.read_f32(kind, name, shape, ranges);
        }
        // One for 256 elements of a row.
        let (mut rows, mut boxes_of_scales) = (shape.to_vec(), ranges.to_vec());
        let (Some(row), Some(columns)) = (rows.last_mut(), boxes_of_scales.last_mut()) else {
            return self.read_f32(kind, name, shape, ranges);
        };
        *row = row.div_ceil(BLOCK);
        let own = columns.clone();
        *columns = own.start / BLOCK..own.end.div_ceil(BLOCK);
        let each = columns.len();
        let scales = self.read_f32(kind, name, &rows, &boxes_of_scales)?;
        let first = own.start / BLOCK;
        let of_row = |row: &[f32]| own.clone().map(|at| row[at / BLOCK - first]).collect::<Vec<_>>();
        Ok(scales.chunks(each.max(1)).flat_map(of_row).collect())
    }

    fn read_f32(&self, kind: Kind, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<Vec<f32>> {
        Ok(self.read_floats(kind, name, shape, ranges)?.into_f32())
    }
}
