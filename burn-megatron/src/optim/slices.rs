//! Boxes of global tensors from parts of units.

use super::blocks::{Blocks, scales_section};
use super::box_runs::box_runs;
use super::layout::{Part, Unit};
use crate::checkpoint::{Kind, Slice, SliceData};
use backend_dist::gpu::buffer::{self, BLOCK};
use backend_dist::shard::copy_bytes;
use burn::tensor::{DType, Tensor};
use safetensors::Dtype;
use std::ops::Range;

/// Adds the boxes of a part of a unit, with a copy of the part's values; of remainders these are the masters'.
pub(super) fn read(slices: &mut Vec<Slice>, kind: Kind, unit: &Unit, range: &Range<usize>, values: Tensor<1>) {
    let data = values.into_data();
    let of_masters: Vec<u8>;
    let (dtype, width, bytes): (Dtype, usize, &[u8]) = if kind == Kind::Remainder {
        of_masters = remainders(data.iter::<f32>());
        (Dtype::I16, 2, &of_masters)
    } else {
        (stored(data.dtype()), data.dtype().size(), data.bytes())
    };
    cut_bytes(slices, kind, unit, range, (dtype, width), bytes);
}

/// The remainders of masters.
pub(super) fn remainders(masters: impl Iterator<Item = f32>) -> Vec<u8> {
    masters.flat_map(|master| buffer::split(master).1.to_le_bytes()).collect()
}

/// Adds the boxes of parts of units, with a copy of the codes and scales of a moment in 8 bits.
pub(super) fn read_blocks<'a>(
    slices: &mut Vec<Slice>,
    kind: Kind,
    blocks: &Blocks,
    parts: impl Iterator<Item = (&'a Unit, &'a Part)>,
) {
    let ((codes, scales), of_scales) = (blocks.data(), kind.scales().expect("moments have scales"));
    for (unit, part) in parts {
        let (range, here) = (&part.range, part.at..part.at + part.range.len());
        cut_bytes(slices, kind, unit, range, (Dtype::U8, 1), &codes[here.clone()]);
        // A parameter begins with a block; what lies behind others in it may not.
        let whole = scales_section(&unit.section).filter(|_| unit.range.start.is_multiple_of(BLOCK));
        if let Some(section) = whole {
            let less = |range: &Range<usize>| range.start / BLOCK..range.end / BLOCK;
            let unit = Unit { section, range: less(&unit.range), ..unit.clone() };
            let bytes = bytemuck::cast_slice(&scales[less(&here)]);
            cut_bytes(slices, of_scales, &unit, &less(range), (Dtype::F32, 4), bytes);
        } else {
            let each: Vec<f32> = here.map(|i| scales[i / BLOCK]).collect();
            cut_bytes(slices, of_scales, unit, range, (Dtype::F32, 4), bytemuck::cast_slice(&each));
        }
    }
}

/// Adds the boxes of a part of a unit, with a copy of their bytes, given the part's.
pub(super) fn cut_bytes(
    slices: &mut Vec<Slice>,
    kind: Kind,
    unit: &Unit,
    range: &Range<usize>,
    (dtype, width): (Dtype, usize),
    bytes: &[u8],
) {
    cut(slices, kind, unit, range, dtype, |runs| {
        let mut copy = vec![0; runs.iter().map(ExactSizeIterator::len).sum::<usize>() * width];
        let mut filled = 0;
        for run in runs {
            let from = &bytes[run.start * width..run.end * width];
            copy_bytes(from, &mut copy[filled..filled + from.len()]);
            filled += from.len();
        }
        copy.into()
    });
}

/// Adds the boxes of a part of a unit; `take` gives the values of runs of the part.
pub(super) fn cut(
    slices: &mut Vec<Slice>,
    kind: Kind,
    unit: &Unit,
    range: &Range<usize>,
    dtype: Dtype,
    take: impl Fn(&[Range<usize>]) -> SliceData,
) {
    let start = range.start - unit.range.start;
    for piece in box_runs(&unit.section, start..range.end - unit.range.start) {
        let runs: Vec<_> = piece.runs.iter().map(|run| run.start - start..run.end - start).collect();
        slices.push(Slice {
            kind,
            name: unit.section.name.clone(),
            global_shape: unit.section.global_shape.clone(),
            ranges: piece.ranges,
            dtype,
            data: take(&runs),
        });
    }
}

/// The type's name in a safetensors file.
pub(super) fn stored(dtype: DType) -> Dtype {
    match dtype {
        DType::F64 => Dtype::F64,
        DType::F32 | DType::Flex32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        other => unreachable!("parameters are floats, not {other:?}"),
    }
}
