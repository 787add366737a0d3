//! Weights that files hold in fewer bits, dequantised while they are read: gpt-oss's experts in MXFP4, DeepSeek-V3's
//! matrices in FP8 with a scale for each block, and those of compressed-tensors. The first two become bf16, as transformers
//! and DeepSeek's own script make them; the last have the type of their scales.

use std::io;
use std::ops::Range;

use half::bf16;
use models::names::{Foreign, StackPart};
use safetensors::Dtype;

use super::compressed;
use super::plain::by_row;
use super::tensors::{Stored, Tensors};
use crate::quantise::e4m3;

/// Rows and columns that share a scale in FP8.
const TILE: usize = 128;
/// Elements that share a scale in MXFP4, and their bytes.
const BLOCK: usize = 32;
const BLOCK_BYTES: usize = BLOCK / 2;

/// How a folder holds a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Storage {
    /// As it is, under this name.
    Plain(String),
    /// `_blocks [experts, out, in/32, 16]` of two elements a byte, and `_scales [experts, out, in/32]`, powers of two
    /// (Open Compute Project, "Microscaling Formats", 2023).
    Mxfp4(String),
    /// e4m3, and `_scale_inv [out/128, in/128]`, what the elements are multiplied with.
    Fp8(String),
    /// As compressed-tensors has it.
    Compressed(String, compressed::Numbers),
}

impl Storage {
    /// How the tensor of Hugging Face's name is stored, if it is there in a form that is quantised. The error says what
    /// is wrong with its parts.
    pub fn find(name: &str, foreign: &Foreign, tensors: &Tensors) -> Result<Option<Self>, String> {
        if let Some(numbers) = compressed::find(name, foreign, tensors)? {
            return Ok(Some(Self::Compressed(name.into(), numbers)));
        }
        if let Some(found) = tensors.get(name).filter(|found| found.dtype == Dtype::F8_E4M3) {
            let scales = format!("{name}_scale_inv");
            let [rows, columns] = found.shape[..] else { return Err("is FP8, and no matrix".into()) };
            let shape = [rows.div_ceil(TILE), columns.div_ceil(TILE)];
            if found.shape != foreign.shape {
                return Err(format!("has shape {:?}, config.json needs {:?}", found.shape, foreign.shape));
            }
            return match tensors.get(&scales) {
                Some(scale) if scale.dtype == Dtype::F32 && scale.shape == shape => Ok(Some(Self::Fp8(name.into()))),
                Some(scale) => {
                    Err(format!("needs {scales} F32 {shape:?}, which is {:?} {:?}", scale.dtype, scale.shape))
                }
                None => Err(format!("is FP8, but {scales} is missing")),
            };
        }
        let [blocks, scales] = Self::Mxfp4(name.into()).parts();
        let (Some(blocks), Some(scales)) = (tensors.get(&blocks), tensors.get(&scales)) else { return Ok(None) };
        let [experts, inputs, outputs] = foreign.shape[..] else { return Err("is MXFP4, and no stack".into()) };
        let groups = inputs.div_ceil(BLOCK);
        let expected = [&[experts, outputs, groups, BLOCK_BYTES][..], &[experts, outputs, groups]];
        let fits = inputs.is_multiple_of(BLOCK) && [blocks, scales].iter().all(|part| part.dtype == Dtype::U8);
        match fits && [blocks.shape, scales.shape] == expected {
            true => Ok(Some(Self::Mxfp4(name.into()))),
            false => Err(format!(
                "is MXFP4 of blocks {:?} and scales {:?}, config.json needs U8 {expected:?}",
                blocks.shape, scales.shape
            )),
        }
    }

    /// The names of its tensors: the elements, and their scales if there are such.
    fn parts(&self) -> [String; 2] {
        match self {
            Self::Plain(name) => [name.clone(), name.clone()],
            Self::Mxfp4(name) => [format!("{name}_blocks"), format!("{name}_scales")],
            Self::Fp8(name) => [name.clone(), format!("{name}_scale_inv")],
            Self::Compressed(name, numbers) => numbers.parts(name),
        }
    }

    /// All names of tensors that it uses.
    pub fn names(&self) -> impl Iterator<Item = String> {
        let shape = match self {
            Self::Compressed(name, compressed::Numbers::Packed { .. }) => Some(format!("{name}_shape")),
            _ => None,
        };
        self.parts().into_iter().chain(shape)
    }

    /// The elements and the scales, if the folder still has them.
    pub fn stored<'a>(&self, tensors: &'a Tensors) -> Option<[Stored<'a>; 2]> {
        let [elements, scales] = self.parts();
        Some([tensors.get(&elements)?, tensors.get(&scales)?])
    }
}

/// Fills `to` with a box of a matrix in MXFP4 as bf16; the stack has the matrices as we have them, not the transposes.
pub(super) fn read_mxfp4(
    [blocks, scales]: [Stored; 2],
    foreign: &Foreign,
    ranges: &[Range<usize>],
    to: &mut [u8],
) -> io::Result<()> {
    let StackPart { index, first, every } = foreign.stack.expect("experts are stacked");
    let (outputs, groups) = (foreign.shape[2], foreign.shape[1] / BLOCK);
    let [rows, columns] = [ranges[0].clone(), ranges[1].clone()];
    by_row(rows.len(), to, |row, to| {
        let at = (index * outputs + first + (rows.start + row) * every) * groups;
        let scales = scales.read(at..at + groups)?;
        let blocks = blocks.read(at * BLOCK_BYTES..(at + groups) * BLOCK_BYTES)?;
        for (column, to) in columns.clone().zip(to.as_chunks_mut::<2>().0) {
            let (byte, scale) = (blocks[column / 2], scales[column / BLOCK]);
            let nibble = if column % 2 == 0 { byte & 15 } else { byte >> 4 };
            *to = bf16::from_f64(e2m1(nibble) * (f64::from(scale) - 127.0).exp2()).to_le_bytes();
        }
        Ok(())
    })
}

/// Fills `to` with a box of a matrix in FP8 as bf16.
pub(super) fn read_fp8(
    [elements, scales]: [Stored; 2],
    foreign: &Foreign,
    ranges: &[Range<usize>],
    to: &mut [u8],
) -> io::Result<()> {
    let (columns, tiles) = (foreign.shape[1], scales.shape[1]);
    let scales = scales.read(0..scales.shape.iter().product::<usize>() * 4)?;
    let scales: Vec<f32> = scales.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    let runs = foreign.runs(ranges);
    by_row(runs.len(), to, |row, to| {
        let run = runs[row];
        let (row, first) = (run.start / columns, run.start % columns);
        let values = elements.read(run.start..run.start + run.len)?;
        for ((column, value), to) in (first..).zip(values).zip(to.as_chunks_mut::<2>().0) {
            let scale = scales[row / TILE * tiles + column / TILE];
            *to = bf16::from_f32(e4m3(value) * scale).to_le_bytes();
        }
        Ok(())
    })
}

/// A number of four bits: sign, two of exponent, one of mantissa.
fn e2m1(nibble: u8) -> f64 {
    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(nibble & 7)];
    if nibble & 8 == 0 { magnitude } else { -magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_few_bits() {
        assert_eq!([0, 1, 7, 8, 15].map(e2m1), [0.0, 0.5, 6.0, -0.0, -6.0]);
    }
}
