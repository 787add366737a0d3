//! The random numbers on a GPU: the host's functions, operation by operation.
#![allow(missing_docs, reason = "the launch macros write public items without documentation")]
#![allow(clippy::needless_range_loop, reason = "kernels have no iterators over constants")]

use super::philox::{MULTIPLIERS, WEYL};
use super::{LOGARITHM, SINE, STEPS};
use crate::pointwise::PointwiseError;
use crate::pointwise::flat::FloatType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};
use std::f64::consts::{FRAC_1_SQRT_2, FRAC_PI_2, LN_2};

/// Units of a cube.
const UNITS: u32 = 256;

/// The distribution, and the stream to draw from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Normal {
    /// Seed.
    pub seed: u64,
    /// Number of the stream.
    pub stream: u64,
    /// Standard deviation.
    pub std: f64,
}

/// Where local elements are in a global array: element `row * width + column` has index `first + row * stride + column`
/// in the stream if `column < used`; otherwise it is padding, which is zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardPosition {
    /// Index of the first element.
    pub first: u64,
    /// Global elements from a row to the next.
    pub stride: u64,
    /// Local elements of a row.
    pub width: usize,
    /// Elements of a row that are not padding.
    pub used: usize,
}

/// Both words of a product of two words, `(high, low)`.
#[cube]
fn wide_product(a: u32, b: u32) -> (u32, u32) {
    (a.mul_hi(b), a * b)
}

/// Four words of Philox4x32-10.
#[cube]
pub(crate) fn words(
    index: u64,
    stream_low: u32,
    stream_high: u32,
    seed_low: u32,
    seed_high: u32,
) -> (u32, u32, u32, u32) {
    let mut a = u32::cast_from(index);
    let mut b = u32::cast_from(index >> 32u64);
    let mut c = stream_low;
    let mut d = stream_high;
    let mut key_a = seed_low;
    let mut key_b = seed_high;
    #[unroll]
    for round in 0..10u32 {
        if comptime![round > 0] {
            key_a += comptime![WEYL[0]];
            key_b += comptime![WEYL[1]];
        }
        let (high_a, low_a) = wide_product(a, comptime![MULTIPLIERS[0]].runtime());
        let (high_c, low_c) = wide_product(c, comptime![MULTIPLIERS[1]].runtime());
        a = high_c ^ b ^ key_a;
        b = low_c;
        c = high_a ^ d ^ key_b;
        d = low_a;
    }
    (a, b, c, d)
}

#[cube]
fn fraction(high: u32, scale: f64, low: u32) -> f64 {
    let whole = fma(f64::cast_from(high), scale, f64::cast_from(low));
    (whole + 0.5) * comptime![1.0 / (1u64 << 52) as f64]
}

#[cube]
fn logarithm(number: f64) -> f64 {
    let mut x = number;
    let mut exponent = 0.0f64;
    #[unroll]
    for i in 0..6usize {
        let scaled = x * comptime![(1u64 << STEPS[i]) as f64];
        let small = scaled < 1.0;
        x = select(small, scaled, x);
        exponent = select(small, exponent - comptime![f64::from(STEPS[i])], exponent);
    }
    let small = x < FRAC_1_SQRT_2;
    x = select(small, x * 2.0, x);
    exponent = select(small, exponent - 1.0, exponent);
    let s = (x - 1.0) / (x + 1.0);
    let z = s * s;
    let mut sum = comptime![LOGARITHM[0]].runtime();
    #[unroll]
    for i in 1..10usize {
        sum = fma(sum, z, comptime![LOGARITHM[i]].runtime());
    }
    fma(exponent, comptime![LN_2].runtime(), 2.0 * s * sum)
}

#[cube]
fn sine(quarters: f64) -> f64 {
    let angle = quarters * FRAC_PI_2;
    let square = angle * angle;
    let mut sum = comptime![SINE[0]].runtime();
    #[unroll]
    for i in 1..12usize {
        sum = fma(sum, square, comptime![SINE[i]].runtime());
    }
    angle * sum
}

#[cube(launch_unchecked)]
pub fn draw_normal<E: Float>(
    out: &mut [E],
    len: u32,
    width: u32,
    used: u32,
    first: u64,
    stride: u64,
    stream_low: u32,
    stream_high: u32,
    seed_low: u32,
    seed_high: u32,
    std: f64,
    #[comptime] double: bool,
) {
    let at = CUBE_POS_X * UNITS + UNIT_POS;
    if at < len {
        let (row, column) = (at / width, at % width);
        let index = first + u64::cast_from(row) * stride + u64::cast_from(column);
        let (a, b, c, d) = words(index, stream_low, stream_high, seed_low, seed_high);
        let square =
            comptime![-2.0f64].runtime() * logarithm(fraction(a, comptime![f64::from(1u32 << 20)].runtime(), b >> 12));
        let sine = sine(fraction(c & 0x7fff_ffff, comptime![f64::from(1u32 << 21)].runtime(), d >> 11));
        let size = square.sqrt() * sine;
        let drawn = std * select(c >> 31 == 1u32, size * comptime![-1.0f64], size);
        let value = select(column < used, drawn, 0.0f64.runtime());
        // Rounded once to f32 and then to 16 bits, as on the host.
        if comptime![double] {
            out[at as usize] = E::cast_from(value);
        } else {
            out[at as usize] = E::cast_from(f32::cast_from(value));
        }
    }
}

/// Fills `out`, `len` elements of type `float` (`None`: f64), with `std · standard_normal(words(seed, stream, index))`,
/// rounded to f32 and then to the type.
///
/// # Errors
/// If the buffer is shorter, there are more elements than fit into 32 bits, or a row has no elements or fewer than
/// `used`.
pub fn normal(
    client: &Client,
    out: &Handle,
    float: Option<FloatType>,
    len: usize,
    place: ShardPosition,
    draw: Normal,
) -> Result<(), PointwiseError> {
    let most = u32::MAX as usize - UNITS as usize;
    for (what, found) in [("elements", len), ("rows", place.width)] {
        if found == 0 || found > most || place.used > place.width {
            return Err(PointwiseError::Length { what, found, multiple: 1, most });
        }
    }
    let (found, expected) = (out.size_in_used(), (len * float.map_or(8, FloatType::size)) as u64);
    if found < expected {
        return Err(PointwiseError::Buffer { name: "out", found, expected });
    }
    // SAFETY: the buffer is long enough.
    let out = unsafe { BufferArg::from_raw_parts(out.clone(), len) };
    let count = CubeCount::Static((len as u32).div_ceil(UNITS), 1, 1);
    let words = |number: u64| (number as u32, (number >> 32) as u32);
    let ((stream_low, stream_high), (seed_low, seed_high)) = (words(draw.stream), words(draw.seed));
    macro_rules! launch {
        ($float:ty, $double:literal) => {
            // SAFETY: units past the last element do nothing.
            unsafe {
                launch_kernel!(draw_normal<$float>, client, count, CubeDim::new_1d(UNITS);
                    out;
                    len as u32, place.width as u32, place.used as u32, place.first, place.stride, stream_low,
                    stream_high, seed_low, seed_high, draw.std; $double)
            }
        };
    }
    match float {
        None => launch!(f64, true),
        Some(FloatType::F32) => launch!(f32, false),
        Some(FloatType::Bf16) => launch!(bf16, false),
        Some(FloatType::F16) => launch!(f16, false),
    }
    Ok(())
}
