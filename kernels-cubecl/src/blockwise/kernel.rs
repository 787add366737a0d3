//! Dequantisation on GPUs: a unit for eight elements, which are next to each other in a matrix row.
use super::{Format, Section, nf4};
use crate::pointwise::{CubeShape, PointwiseError, Vec8, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// NF4: `words` are the bytes, four in a word, the first in its lowest bits.
#[cube(launch_unchecked)]
pub fn dequantize_nf4<E: Float>(
    words: &[u32],
    scales: &[f32],
    out: &mut [Vec8<E>],
    vectors: u32,
    row_vectors: u32,
    first_word: u32,
    first_amax: u32,
    first_nested: u32,
    first_block: u32,
    row_blocks: u32,
    first_out: u32,
    offset: f32,
) {
    let at = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if at < vectors {
        let (row, column) = (at / row_vectors, at % row_vectors);
        // Eight vectors are a block.
        let own = first_amax + row * (row_vectors / 8) + column / 8;
        let code = (words[(own / 4) as usize] >> (8 * (own % 4))) & 0xffu32;
        let block = first_block + row * row_blocks + column / 8;
        let nested = scales[(first_nested + block / comptime![nf4::NESTED as u32]) as usize];
        let amax = scales[(comptime![nf4::NUMBERS.len() as u32] + code) as usize] * nested + offset;
        let word = words[(first_word + at) as usize];
        let mut result = Vec8::<E>::empty();
        #[unroll]
        for i in 0..8usize {
            // The first of two elements is in the upper half of its byte.
            let shift = comptime![8 * (i as u32 / 2) + if i % 2 == 0 { 4 } else { 0 }];
            result.insert(i, E::cast_from(scales[((word >> shift) & 15u32) as usize] * amax));
        }
        out[(first_out + at) as usize] = result;
    }
}

/// The number that eight bits stand for in E4M3; not for NaN.
#[cube]
fn e4m3(code: u32) -> f32 {
    let magnitude = code & 0x7fu32;
    let normal = f32::reinterpret((magnitude << 20) + comptime![(127u32 - 7) << 23]);
    let small = f32::cast_from(magnitude) * comptime![1.0f32 / 512.0];
    let size = select(magnitude < 8u32, small, normal);
    select(code > 0x7fu32, -size, size)
}

/// FP8: `words` as in [`dequantize_nf4`].
#[cube(launch_unchecked)]
pub fn dequantize_fp8<E: Float>(
    words: &[u32],
    scales: &[f32],
    out: &mut [Vec8<E>],
    vectors: u32,
    row_vectors: u32,
    first_word: u32,
    first_scale: u32,
    first_out: u32,
) {
    let at = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if at < vectors {
        let (row, column) = (at / row_vectors, at % row_vectors);
        // A block has 128 rows, and 16 vectors of each.
        let scale = scales[(first_scale + row / 128 * ((row_vectors + 15) / 16) + column / 16) as usize];
        let mut result = Vec8::<E>::empty();
        #[unroll]
        for i in 0..8usize {
            let word = words[(first_word + 2 * at + comptime![i as u32 / 4]) as usize];
            let code = (word >> comptime![8 * (i as u32 % 4)]) & 0xffu32;
            result.insert(i, E::cast_from(e4m3(code) * scale));
        }
        out[(first_out + at) as usize] = result;
    }
}

/// Whether there is a kernel for this section.
pub fn has_kernel(section: &Section) -> bool {
    check_section(section).is_ok()
}

/// Writes a section's elements, of type `E` (2 or 4 bytes), to `out` from element `first_out` on, a multiple of 8. `bytes`
/// and `scales` are as in [`dequantize`](super::dequantize).
///
/// # Errors
/// If there is no kernel for these sizes, or a buffer is too short.
pub fn dequantize<E: Float>(
    client: &Client,
    format: Format,
    (bytes, scales): (&Handle, &Handle),
    section: &Section,
    (out, first_out): (&Handle, usize),
) -> Result<(), PointwiseError> {
    check_section(section)?;
    check("first element", first_out + 8, 8, i32::MAX as usize)?;
    let (rows, columns) = (section.sizes.rows, section.sizes.columns);
    let (cube, vectors, row_vectors) = (CubeShape::of(client), rows * columns / 8, columns / 8);
    let words = bytes.size_in_used() as usize / 4;
    let needed = section.codes / 4 + vectors * if format == Format::Nf4 { 1 } else { 2 };
    if words < needed {
        return Err(PointwiseError::Buffer { name: "bytes", found: 4 * words as u64, expected: 4 * needed as u64 });
    }
    let numbers = scales.size_in_used() as usize / 4;
    let (words, scales) = (buffer("bytes", bytes, words, 4)?, buffer("scales", scales, numbers, 4)?);
    let out = buffer("out", out, first_out / 8 + vectors, size_of::<Vec8<E>>())?;
    let first_word = (section.codes / 4) as u32;
    // SAFETY: units past the last vector do nothing, and the buffers hold what the section says.
    unsafe {
        match format {
            Format::Nf4 => launch_kernel!(dequantize_nf4<E>, client, cube.line(vectors), cube.dim();
                words, scales, out;
                vectors as u32, row_vectors as u32, first_word, section.amax as u32, section.scales as u32,
                section.first_block as u32, section.row_blocks as u32, (first_out / 8) as u32, section.offset),
            Format::Fp8 => launch_kernel!(dequantize_fp8<E>, client, cube.line(vectors), cube.dim();
                words, scales, out;
                vectors as u32, row_vectors as u32, first_word, section.scales as u32, (first_out / 8) as u32),
        }
    };
    Ok(())
}

fn check_section(section: &Section) -> Result<(), PointwiseError> {
    let (rows, columns) = (section.sizes.rows, section.sizes.columns);
    check("columns", columns, 8, i32::MAX as usize)?;
    check("rows", rows, 1, i32::MAX as usize / columns)?;
    check("first code", section.codes + 4, 4, i32::MAX as usize)
}
