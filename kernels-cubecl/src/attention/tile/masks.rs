//! What a query does not see, and what dropout drops.
use crate::attention::draw;
use crate::attention::variant::Variant;
use crate::tiling::Sight;
use cubecl::prelude::*;

/// A score no query sees: finite, so that a block without any visible key does no harm.
pub const HIDDEN: f32 = -1.0e30;

/// Hides the keys that rows `row` and `row + 8` do not see; `column` is the key of the unit's first score.
#[cube]
pub fn hide(
    scores: &mut Array<f32>,
    row: u32,
    column: u32,
    sight: &Sight,
    #[comptime] block: usize,
    #[comptime] variant: Variant,
) {
    #[unroll]
    for half in 0..2usize {
        let place = row as i32 + sight.offset + comptime![(half * 8) as i32] - column as i32;
        let mut end = sight.keys as i32 - column as i32;
        if comptime![variant.causal] {
            end = min(end, place + 1);
        } else if comptime![variant.window] {
            end = min(end, place + sight.window);
        }
        let begin = place + 1 - sight.window;
        #[unroll]
        for i in 0..comptime![block / 4] {
            let index = comptime![(i / 2) * 4 + half * 2 + i % 2];
            let key = comptime![((i / 2) * 8 + i % 2) as i32];
            scores[index] = select(key < end, scores[index], HIDDEN);
            if comptime![variant.window] {
                scores[index] = select(key >= begin, scores[index], HIDDEN);
            }
        }
    }
}

/// The two keys of dropout for each of a unit's two rows.
#[derive(CubeType)]
pub struct Draws {
    /// First keys of rows `row` and `row + 8`.
    pub first: Array<u32>,
    /// Second keys.
    pub second: Array<u32>,
}

/// The dropout keys of rows `row` and `row + 8`, which begin at `at` in `keys`; rows past the last have those of the
/// last.
#[cube]
pub fn draws(keys: &[u32], at: u32, row: u32, queries: u32, statistics: u32, #[comptime] dropout: bool) -> Draws {
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
    Draws { first, second }
}

/// Whether score `index` of a unit survives dropout; `place` is the spread number of the unit's first column.
#[cube]
pub fn survives(draws: &Draws, place: u32, limit: u32, #[comptime] index: usize) -> bool {
    let half = comptime![(index / 2) % 2];
    let column = comptime![draw::spread_by((index / 4) * 8 + index % 2)];
    draw::draw(place + column, draws.first[half], draws.second[half]) >= limit
}
