//! Masks of scores, and dropout of probabilities.
use crate::{attention::dropout, attention::variant::Variant, tiling::AttentionMask};
use cubecl::prelude::*;

/// A masked score: finite, so that a block without any visible key does no harm.
pub const MASKED: f32 = -1.0e30;

/// Masks the keys that rows `row` and `row + 8` do not see; `column` is the key of the unit's first score.
#[cube]
pub fn apply_mask(
    scores: &mut Array<f32>,
    row: u32,
    column: u32,
    mask: &AttentionMask,
    #[comptime] block: usize,
    #[comptime] variant: Variant,
) {
    #[unroll]
    for half in 0..2usize {
        let position = row as i32 + mask.offset + comptime![(half * 8) as i32] - column as i32;
        let mut end = mask.keys as i32 - column as i32;
        if comptime![variant.causal] {
            end = min(end, position + 1);
        } else if comptime![variant.window] {
            end = min(end, position + mask.window);
        }
        let begin = position + 1 - mask.window;
        #[unroll]
        for i in 0..comptime![block / 4] {
            let index = comptime![(i / 2) * 4 + half * 2 + i % 2];
            let key = comptime![((i / 2) * 8 + i % 2) as i32];
            scores[index] = select(key < end, scores[index], MASKED);
            if comptime![variant.window] {
                scores[index] = select(key >= begin, scores[index], MASKED);
            }
        }
    }
}

/// Dropout keys of a unit's two rows.
#[derive(CubeType)]
pub struct RowDropoutKeys {
    /// First keys of rows `row` and `row + 8`.
    pub first: Array<u32>,
    /// Second keys.
    pub second: Array<u32>,
}

/// The dropout keys of rows `row` and `row + 8`, which begin at `at` in `keys`. Rows past the last query take the last
/// query's.
#[cube]
pub fn row_dropout_keys(
    keys: &[u32],
    at: u32,
    row: u32,
    queries: u32,
    statistics: u32,
    #[comptime] dropout: bool,
) -> RowDropoutKeys {
    let mut first = Array::<u32>::new(2usize);
    let mut second = Array::<u32>::new(2usize);
    if comptime![dropout] {
        #[unroll]
        for half in 0..2usize {
            let index = at + u32::min(row + comptime![(half * 8) as u32], queries - 1);
            first[half] = keys[index as usize];
            second[half] = keys[(index + statistics) as usize];
        }
    }
    RowDropoutKeys { first, second }
}

/// Whether dropout keeps score `index` of a unit; `column` is the [`spread`](dropout::spread) of the unit's first key.
#[cube]
pub fn is_kept(dropout_keys: &RowDropoutKeys, column: u32, drop_threshold: u32, #[comptime] index: usize) -> bool {
    let half = comptime![(index / 2) % 2];
    let offset = comptime![dropout::spread_by((index / 4) * 8 + index % 2)];
    dropout::dropout_hash(column + offset, dropout_keys.first[half], dropout_keys.second[half]) >= drop_threshold
}
