//! The kernels that write masks as bits.
use super::{BitMask, WORD};
use crate::attention::AttentionError;
use crate::fused::{Draw, draw_words, four_draws};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Planes of a cube: as many words of a row of queries.
const PLANES: u32 = 4;

/// The bits of a mask `[batch, heads, queries, keys]` of numbers, set where a number is not zero. `mask` has no gaps.
///
/// # Errors
/// If the buffer is too short.
pub fn pack_hidden<E: Float>(client: &Client, mask: &Handle, shape: [usize; 4]) -> Result<BitMask, AttentionError> {
    let len = shape.iter().product::<usize>();
    let (found, expected) = (mask.size_in_used(), (len * size_of::<E>()) as u64);
    if found < expected {
        return Err(AttentionError::Buffer { name: "mask", found, expected });
    }
    let bits = BitMask::empty(client, shape);
    let (count, dim) = grid(shape);
    // SAFETY: the mask has been checked, and units write words that the bits have.
    unsafe {
        launch_kernel!(hidden_bits<E>, client, count, dim;
            BufferArg::from_raw_parts(mask.clone(), len), bits.of_queries().0, bits.of_keys().0;
            shape[2] as u32, shape[3] as u32)
    };
    Ok(bits)
}

/// The bits of the weights `[batch, heads, queries, keys]` that a draw keeps: its element `i` is weight `i`. The keys are a
/// multiple of four.
pub fn pack_kept(client: &Client, draw: Draw, shape: [usize; 4]) -> BitMask {
    debug_assert!(shape[3].is_multiple_of(4), "rows of whole numbers of four draws");
    let bits = BitMask::empty(client, shape);
    let (count, dim) = grid(shape);
    // SAFETY: units write words that the bits have.
    unsafe {
        launch_kernel!(kept_bits, client, count, dim; draw_words(draw).into_iter().collect(), bits.of_queries().0,
            bits.of_keys().0; shape[2] as u32, shape[3] as u32)
    };
    bits
}

/// A plane for 32 queries and 32 keys; cube `(head of a batch, word of queries, four words of keys)`: a grid may be longer
/// than 65,535 only in its first dimension.
fn grid([batch, heads, queries, keys]: [usize; 4]) -> (CubeCount, CubeDim) {
    let words = keys.div_ceil(WORD).div_ceil(PLANES as usize);
    let count = CubeCount::Static((batch * heads) as u32, queries.div_ceil(WORD) as u32, words as u32);
    (count, CubeDim::new_1d(PLANES * WORD as u32))
}

#[cube(launch_unchecked)]
pub fn hidden_bits<E: Float>(mask: &[E], by_query: &mut [u32], by_key: &mut [u32], queries: u32, keys: u32) {
    let word = CUBE_POS_Z * PLANES + UNIT_POS / 32;
    // Units past the last query have its bits: they are the whole words of a mask that is one for all queries.
    let query = u32::min(CUBE_POS_Y * 32 + UNIT_POS % 32, queries - 1);
    let row = (CUBE_POS_X * queries + query) * keys;
    let mut bits = 0u32;
    for i in 0..32u32 {
        let key = word * 32 + i;
        if key < keys && mask[(row + key) as usize] != E::new(0.0) {
            bits |= 1u32 << i;
        }
    }
    write_bits(bits, word, by_query, by_key, queries, keys);
}

#[cube(launch_unchecked)]
pub fn kept_bits(draws: &Sequence<u32>, by_query: &mut [u32], by_key: &mut [u32], queries: u32, keys: u32) {
    let word = CUBE_POS_Z * PLANES + UNIT_POS / 32;
    let query = u32::min(CUBE_POS_Y * 32 + UNIT_POS % 32, queries - 1);
    let first = u64::cast_from(CUBE_POS_X * queries + query) * u64::cast_from(keys) + u64::cast_from(word * 32);
    let mut bits = 0u32;
    for i in 0..8u32 {
        bits |= four_draws(first + u64::cast_from(4 * i), draws, 0usize) << (4 * i);
    }
    write_bits(bits, word, by_query, by_key, queries, keys);
}

/// Writes a unit's word of its query, and the plane's words of its 32 keys.
#[cube]
fn write_bits(bits: u32, word: u32, by_query: &mut [u32], by_key: &mut [u32], queries: u32, keys: u32) {
    let unit = UNIT_POS % 32;
    let mut of_key = 0u32;
    for i in 0..32u32 {
        let column = plane_ballot((bits >> i) & 1 != 0).extract(0usize);
        of_key = select(i == unit, column, of_key);
    }
    let (words, query, key) = (keys.div_ceil(32), CUBE_POS_Y * 32 + unit, word * 32 + unit);
    if query < queries && word < words {
        by_query[((CUBE_POS_X * queries + query) * words + word) as usize] = bits;
    }
    if key < keys {
        by_key[((CUBE_POS_X * keys + key) * queries.div_ceil(32) + CUBE_POS_Y) as usize] = of_key;
    }
}
