//! FP8 operands: amax, casts with a scale or with one for each block, transposes. Four eight-bit numbers are packed into a `u32`, the first in the
//! lowest bits.
//!
//! A cast is `round(x · scale)` to nearest even. Numbers beyond the largest one, infinity included, become that number;
//! NaN stays.
#![allow(missing_docs, reason = "the launch macros write public items without documentation")]

#[cfg(feature = "cuda")]
pub mod amax;
#[cfg(feature = "cuda")]
pub mod blocks;
#[cfg(feature = "cuda")]
pub mod cast;
pub mod codec;
#[cfg(feature = "cuda")]
pub mod groups;
#[cfg(feature = "cuda")]
pub mod ptx;
#[cfg(feature = "cuda")]
pub mod transpose;

#[cfg(feature = "cuda")]
use crate::pointwise::UNITS;
#[cfg(feature = "cuda")]
use cubecl::prelude::*;

/// Eight eight-bit numbers: a line of a block.
#[cfg(feature = "cuda")]
pub type Eight = Vector<u32, Const<2>>;

/// Eight numbers of 16 bits.
#[cfg(feature = "cuda")]
type Vec8<E> = Vector<E, Const<8>>;

/// The two formats of the OCP's 8-bit floating point specification (2023).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// Four bits of exponent, three of mantissa, no infinity; up to 448.
    E4m3,
    /// Five bits of exponent, two of mantissa; up to 57344.
    E5m2,
}

impl Format {
    /// The largest number.
    pub fn max(self) -> f32 {
        match self {
            Self::E4m3 => 448.0,
            Self::E5m2 => 57344.0,
        }
    }
}

/// Rows and columns of a block that has a scale of its own.
pub const BLOCK: usize = 128;

/// The numbers of a matrix that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Granularity {
    /// All of them.
    Tensor,
    /// [`BLOCK`] consecutive ones of a row.
    Vector,
    /// [`BLOCK`] rows and columns.
    Block,
}

impl Granularity {
    /// Shape of the scales of a matrix `[rows, inner]`, whose sides are multiples of [`BLOCK`] unless it has one scale: those of
    /// vectors lie one block of columns after the other, and lines of blocks are padded to fours, as cuBLASLt reads them.
    pub fn scales(self, rows: usize, inner: usize) -> [usize; 2] {
        match self {
            Self::Tensor => [1, 1],
            Self::Vector => [inner / BLOCK, rows],
            Self::Block => [rows / BLOCK, (inner / BLOCK).next_multiple_of(4)],
        }
    }
}

/// How four numbers are converted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Codec {
    /// By the GPU's instruction (compute capability 8.9 or more).
    Instruction,
    /// By integer arithmetic, which every device has; the same bits.
    Arithmetic,
}

/// The bits of four numbers, which are already scaled.
#[cfg(feature = "cuda")]
#[cube]
pub fn pack(a: f32, b: f32, c: f32, d: f32, #[comptime] format: Format, #[comptime] codec: Codec) -> u32 {
    if comptime![matches!(codec, Codec::Instruction)] {
        ptx::pack(a, b, c, d, format)
    } else {
        let (a, b) = (codec::encode(a, format), codec::encode(b, format));
        let (c, d) = (codec::encode(c, format), codec::encode(d, format));
        a | (b << 8) | (c << 16) | (d << 24)
    }
}
