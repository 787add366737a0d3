//! Matrices in few bits with a scale for each block of their elements, and what they stand for: the frozen weights of
//! QLoRA (Dettmers et al., 2023).
//!
//! | | blocks | an element | a scale |
//! |---|---|---|---|
//! | [`Format::Nf4`] | 64 elements of a matrix row | 4 bits, the nearest of 16 quantiles of a normal distribution | 8 bits: the amax less the matrix's mean amax, in blocks of 256 with an fp32 amax each (double quantisation) |
//! | [`Format::Fp8`] | 128 × 128 | E4M3 | fp32, `amax / 448` |
//!
//! Codes and numbers are, bit for bit, those of bitsandbytes 0.50 (`quantize_4bit(blocksize=64, quant_type="nf4",
//! compress_statistics=True)`). A rank's part of a matrix has the codes of the whole matrix: [`Section`] says where its
//! blocks are.
//!
//! ```
//! use kernels_cubecl::blockwise::{Format, Section, Sizes, dequantize, nf4, tables};
//!
//! let weight: Vec<f32> = (0..256).map(|at| (at as f32 * 0.7).sin() * 0.02).collect();
//! let quantized = nf4::quantize(&weight);
//! let sizes = Sizes { rows: 2, columns: 128 };
//! let scales = [tables(), quantized.nested.clone()].concat();
//! let bytes = [quantized.codes.clone(), quantized.amax.clone()].concat();
//! let section = Section { codes: 0, amax: 128, scales: tables().len(), offset: quantized.offset, ..Section::whole(sizes) };
//! let mut found = vec![0.0; 256];
//! dequantize(Format::Nf4, &bytes, &scales, &section, 0..2, &mut found);
//! assert!(found.iter().zip(&weight).all(|(a, b)| (a - b).abs() < 0.004));
//! assert_eq!(bytes.len(), 132, "4 bits an element, and a byte for 64");
//! ```
#![allow(missing_docs, reason = "the launch macros write public items without documentation")]

pub mod fp8;
#[cfg(feature = "cuda")]
pub mod kernel;
pub mod nf4;

use std::ops::Range;

use crate::fp8::{Format as Fp8Format, codec::decode_host};

/// How elements are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// Four bits, doubly quantised.
    Nf4,
    /// E4M3.
    Fp8,
}

impl Format {
    /// Bytes of a matrix `[rows, columns]`, with the tables of NF4.
    pub fn bytes(self, rows: usize, columns: usize) -> usize {
        match self {
            Self::Nf4 => {
                let blocks = rows * columns / nf4::BLOCK;
                rows * columns / 2 + blocks + blocks.div_ceil(nf4::NESTED) * 4 + tables().len() * 4
            }
            Self::Fp8 => rows * columns + rows.div_ceil(fp8::BLOCK) * columns.div_ceil(fp8::BLOCK) * 4,
        }
    }
}

/// Rows and columns of a rank's part of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Rows.
    pub rows: usize,
    /// Columns, a multiple of 8; with [`Format::Nf4`] of 64.
    pub columns: usize,
}

/// A rank's part of a matrix in buffers that several matrices share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Section {
    /// Its sizes.
    pub sizes: Sizes,
    /// The byte at which its codes begin, a multiple of 4.
    pub codes: usize,
    /// The byte at which the scales of NF4 blocks begin.
    pub amax: usize,
    /// The number at which its fp32 scales begin: those of all blocks of 256 NF4 scales of the whole matrix, or those of
    /// its own FP8 blocks.
    pub scales: usize,
    /// Mean amax of the whole matrix; NF4 only.
    pub offset: f32,
    /// The number of its first block in the whole matrix; NF4 only.
    pub first_block: usize,
    /// Blocks of a row of the whole matrix; NF4 only.
    pub row_blocks: usize,
}

impl Section {
    /// A whole matrix at the beginning of all buffers.
    pub fn whole(sizes: Sizes) -> Self {
        let row_blocks = sizes.columns / nf4::BLOCK;
        Self { sizes, codes: 0, amax: 0, scales: 0, offset: 0.0, first_block: 0, row_blocks }
    }
}

/// What is in front of the scales of NF4: its 16 numbers, and the 256 of the 8-bit scales.
pub fn tables() -> Vec<f32> {
    nf4::NUMBERS.into_iter().chain(nf4::dynamic_numbers()).collect()
}

/// Some matrix rows of a section, one after the other. With [`Format::Nf4`] `scales` begin with [`tables`].
///
/// # Panics
/// If buffers are too short.
pub fn dequantize(
    format: Format,
    bytes: &[u8],
    scales: &[f32],
    section: &Section,
    rows: Range<usize>,
    out: &mut [f32],
) {
    let Section { sizes: Sizes { columns, .. }, codes, .. } = *section;
    for (row, out) in rows.zip(out.chunks_exact_mut(columns)) {
        match format {
            Format::Nf4 => {
                let (numbers, amaxes) = scales.split_at(nf4::NUMBERS.len());
                let own = columns / nf4::BLOCK;
                for (at, out) in out.chunks_exact_mut(nf4::BLOCK).enumerate() {
                    let block = section.first_block + row * section.row_blocks + at;
                    let nested = scales[section.scales + block / nf4::NESTED];
                    let amax = amaxes[usize::from(bytes[section.amax + row * own + at])] * nested + section.offset;
                    let first = codes + (row * columns + at * nf4::BLOCK) / 2;
                    for (out, pair) in out.chunks_exact_mut(2).zip(&bytes[first..first + nf4::BLOCK / 2]) {
                        out[0] = numbers[usize::from(pair >> 4)] * amax;
                        out[1] = numbers[usize::from(pair & 15)] * amax;
                    }
                }
            }
            Format::Fp8 => {
                let blocks = columns.div_ceil(fp8::BLOCK);
                let codes = &bytes[codes + row * columns..codes + (row + 1) * columns];
                for (at, (out, codes)) in out.chunks_mut(fp8::BLOCK).zip(codes.chunks(fp8::BLOCK)).enumerate() {
                    let scale = scales[section.scales + row / fp8::BLOCK * blocks + at];
                    out.iter_mut()
                        .zip(codes)
                        .for_each(|(out, code)| *out = decode_host(*code, Fp8Format::E4m3) * scale);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_an_element() {
        let each = |format: Format| format.bytes(4096, 4096) as f64 / (4096.0 * 4096.0);
        assert!((each(Format::Nf4) - 0.5159).abs() < 1e-4 && (each(Format::Fp8) - 1.0002).abs() < 1e-4);
    }
}
