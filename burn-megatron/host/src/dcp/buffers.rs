//! Tensors whose elements lie in flat arrays, as Megatron-Core's distributed optimizer keeps them (`dp_reshardable`). Pure
//! arithmetic.

use std::ops::Range;

use safetensors::Dtype;

use super::flattened::split;
use super::folder::{Chunk, DcpTensor};
use crate::boxes::len;

impl DcpTensor {
    /// A tensor of `shape` whose `boxes` lie in flat arrays: each row-major, from an element of its array on.
    pub fn in_arrays<'a>(
        dtype: Dtype,
        shape: Vec<usize>,
        boxes: impl IntoIterator<Item = (Vec<Range<usize>>, &'a Self, usize)>,
    ) -> Self {
        let (size, mut chunks) = (dtype.bitsize() / 8, Vec::new());
        for (ranges, array, first) in boxes {
            let sizes: Vec<usize> = ranges.iter().map(ExactSizeIterator::len).collect();
            for Chunk { ranges: stored, file, start } in &array.chunks {
                let (from, to) = (first.max(stored[0].start), (first + len(&ranges)).min(stored[0].end));
                if from >= to {
                    continue;
                }
                let mut parts = Vec::new();
                split(&sizes, from - first..to - first, &mut Vec::new(), &mut parts);
                let mut start = start + ((from - stored[0].start) * size) as u64;
                for part in parts {
                    let bytes = (len(&part) * size) as u64;
                    let moved =
                        part.iter().zip(&ranges).map(|(part, all)| all.start + part.start..all.start + part.end);
                    chunks.push(Chunk { ranges: moved.collect(), file: *file, start });
                    start += bytes;
                }
            }
        }
        Self { dtype, shape, chunks }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// A matrix of two column boxes in an array whose boxes end anywhere: every element is where it was put.
        #[test]
        fn elements_are_found_where_they_were_put(
            (rows, columns, gap) in (1usize..5, 1usize..5, 0usize..4),
            ends in prop::collection::vec(0usize..60, 0..5),
        ) {
            let (half, all) = (rows * columns, 2 * rows * columns + 2 * gap);
            let mut ends: Vec<usize> = ends.into_iter().map(|end| end % (all + 1)).chain([0, all]).collect();
            ends.sort_unstable();
            ends.dedup();
            let chunk = |(file, pair): (usize, &[usize])| {
                Chunk { ranges: vec![pair[0]..pair[1]], file, start: 1000 * file as u64 }
            };
            let chunks: Vec<Chunk> = ends.windows(2).enumerate().map(chunk).collect();
            let array = DcpTensor { dtype: Dtype::F32, shape: vec![all], chunks };
            let boxes = [0, 1].map(|at| {
                (vec![0..rows, at * columns..(at + 1) * columns], &array, gap + at * (half + gap))
            });
            let tensor = DcpTensor::in_arrays(Dtype::F32, vec![rows, 2 * columns], boxes);
            for row in 0..rows {
                for column in 0..2 * columns {
                    let at = gap + column / columns * (half + gap) + row * columns + column % columns;
                    let stored = array.chunks.iter().find(|chunk| chunk.ranges[0].contains(&at)).unwrap();
                    let expected = (stored.file, stored.start + 4 * (at - stored.ranges[0].start) as u64);
                    let holds = |chunk: &&Chunk| chunk.ranges[0].contains(&row) && chunk.ranges[1].contains(&column);
                    let found: Vec<(usize, u64)> = tensor.chunks.iter().filter(holds).map(|chunk| {
                        let inside = (row - chunk.ranges[0].start) * chunk.ranges[1].len() + column - chunk.ranges[1].start;
                        (chunk.file, chunk.start + 4 * inside as u64)
                    }).collect();
                    prop_assert_eq!(found, vec![expected]);
                }
            }
        }
    }
}
