//! Matrices as compressed-tensors stores them: numbers of few bits and, for each output channel or group of inputs, what
//! they are multiplied with (`compressed_tensors/compressors`, `naive_quantized` and `pack_quantized`).

use std::io;
use std::ops::Range;

use models::names::Foreign;
use safetensors::Dtype;

use super::plain::by_row;
use super::tensors::{Stored, Tensors};
use crate::element::Element;
use crate::quantise::{Grid, packed_len, unpack};

/// How numbers are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Numbers {
    /// `weight [out, in]` of bytes.
    Bytes(Grid),
    /// `weight_packed [out, in·bits/32]` of words, and `weight_shape`.
    Packed {
        /// Of an integer.
        bits: usize,
    },
}

impl Numbers {
    /// The names of its tensors: the numbers, and their scales.
    pub fn parts(self, name: &str) -> [String; 2] {
        let numbers = match self {
            Self::Bytes(_) => name.into(),
            Self::Packed { .. } => format!("{name}_packed"),
        };
        [numbers, format!("{name}_scale")]
    }
}

/// How the matrix of Hugging Face's name is stored, if it is there in this form. The error says what is wrong with its
/// parts.
pub(super) fn find(name: &str, foreign: &Foreign, tensors: &Tensors) -> Result<Option<Numbers>, String> {
    let Some(scale) = tensors.get(&format!("{name}_scale")) else { return Ok(None) };
    let [rows, columns] = foreign.shape[..] else { return Err("has scales, and is no matrix".into()) };
    for (part, what) in [("zero_point", "zero points"), ("g_idx", "inputs in another order")] {
        if tensors.get(&format!("{name}_{part}")).is_some() {
            return Err(format!("has {what} ({name}_{part}); only symmetric quantisation in order is read"));
        }
    }
    let plain = tensors.get(name).map(|found| (found.dtype, found.shape));
    let packed = tensors.get(&format!("{name}_packed")).map(|found| (found.dtype, found.shape));
    let words = |bits| packed == Some((Dtype::I32, &[rows, packed_len(columns, bits)][..]));
    let numbers = match plain {
        Some((Dtype::F8_E4M3, shape)) if shape == foreign.shape => Numbers::Bytes(Grid::Fp8),
        Some((Dtype::I8, shape)) if shape == foreign.shape => Numbers::Bytes(Grid::Int { bits: 8 }),
        None if words(4) => Numbers::Packed { bits: 4 },
        None if words(8) => Numbers::Packed { bits: 8 },
        found => {
            return Err(format!(
                "has scales, and numbers {:?}; config.json needs {:?} of F8_E4M3 or I8, or 4 or 8 bits of it in I32 \
                 ({name}_packed)",
                found.or(packed),
                foreign.shape
            ));
        }
    };
    let groups = scale.shape.get(1).copied().unwrap_or(0);
    let fits = scale.shape == [rows, groups] && groups > 0 && columns.is_multiple_of(groups);
    if !fits || Element::of(scale.dtype).is_none() {
        return Err(format!(
            "needs {name}_scale of floats [{rows}, 1] or [{rows}, groups] with groups that divide {columns}, which is {:?} \
             {:?}",
            scale.dtype, scale.shape
        ));
    }
    Ok(Some(numbers))
}

/// Fills `to` with a box of a matrix, in the type of its scales, each element rounded once.
pub(super) fn read_compressed(
    [stored, scales]: [Stored; 2],
    numbers: Numbers,
    element: Element,
    (foreign, ranges): (&Foreign, &[Range<usize>]),
    to: &mut [u8],
) -> io::Result<()> {
    let (columns, groups) = (foreign.shape[1], scales.shape[1]);
    let group = columns / groups;
    let runs = foreign.runs(ranges);
    by_row(runs.len(), to, |row, to| {
        let run = runs[row];
        let (row, first) = (run.start / columns, run.start % columns);
        let size = element.size();
        let scales = element.decode(&scales.read(row * groups * size..(row + 1) * groups * size)?);
        let values: Vec<f64> = match numbers {
            Numbers::Bytes(grid) => {
                let codes = stored.read(run.start..run.start + run.len)?;
                codes.iter().map(|code| grid.decode(*code)).collect()
            }
            Numbers::Packed { bits } => {
                let len = packed_len(columns, bits) * 4;
                let words = stored.read(row * len..(row + 1) * len)?;
                let words = words.as_chunks::<4>().0;
                let word = |at: usize| u32::from_le_bytes(words[at]);
                (first..first + run.len).map(|column| f64::from(unpack(word, column, bits))).collect()
            }
        };
        let scaled = values.iter().zip(first..).map(|(value, column)| value * scales[column / group]);
        let mut bytes = Vec::with_capacity(to.len());
        element.encode(&scaled.collect::<Vec<_>>(), &mut bytes);
        to.copy_from_slice(&bytes);
        Ok(())
    })
}
