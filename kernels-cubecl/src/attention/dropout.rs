//! Dropout of attention probabilities by a hash of their position; see [`Dropout`](super::Dropout).
use crate::pointwise::dropout::mix;
use cubecl::prelude::*;

/// Units of a cube of [`dropout_keys`].
pub const UNITS: u32 = 128;

/// SplitMix64 of Steele, Lea and Flood.
#[cube]
pub fn splitmix(x: u64) -> u64 {
    let x = x + 0x9e37_79b9_7f4a_7c15u64;
    let x = (x ^ (x >> 30)) * 0xbf58_476d_1ce4_e5b9u64;
    let x = (x ^ (x >> 27)) * 0x94d0_49bb_1331_11ebu64;
    x ^ (x >> 31)
}

/// Two dropout keys for each row of scores, `[2, batch, heads, row]`. Cube `(row block, head, batch)`; row `(batch,
/// head, query)` of the call is row `((first_batch + batch) total_heads + first_head + head) total_queries +
/// first_query + query` of the whole tensor.
#[cube(launch_unchecked)]
pub fn dropout_keys(
    keys: &mut [u32],
    stride: u32,
    seed: u64,
    first_batch: u64,
    first_head: u64,
    first_query: u64,
    total_heads: u64,
    total_queries: u64,
) {
    let row = CUBE_POS_X * UNITS + UNIT_POS;
    let head = (first_batch + CUBE_POS_Z as u64) * total_heads + first_head + CUBE_POS_Y as u64;
    let global_row = head * total_queries + first_query + row as u64;
    let key = splitmix(seed ^ splitmix(global_row));
    let at = ((CUBE_POS_Z * CUBE_COUNT_Y + CUBE_POS_Y) * stride + row) as usize;
    keys[at] = (key >> 32) as u32;
    keys[at + (CUBE_COUNT_Z * CUBE_COUNT_Y * stride) as usize] = (key & 0xffff_ffffu64) as u32;
}

/// The random number of an element, from `column` (see [`spread`]) and the keys of its row.
#[cube]
pub fn dropout_hash(column: u32, first: u32, second: u32) -> u32 {
    mix(mix(column + first) ^ second)
}

/// A column's index times the constant that spreads columns over 32 bits.
#[cube]
pub fn spread(column: u32) -> u32 {
    column * 0x9e37_79b9u32
}

/// [`spread`] of a distance between columns known at compile time.
pub fn spread_by(columns: usize) -> u32 {
    (columns as u32).wrapping_mul(0x9e37_79b9)
}
