//! Which queries see a unit's keys.
use super::KeyGradientPlan;
use crate::attention::tile::HIDDEN;
use crate::attention::variant::Part;
use cubecl::prelude::*;

/// Below every query's number, and far from the least `i32`.
const BEFORE_ALL: i32 = -(1 << 30);

/// The queries that see the key of a unit's first row, counted from the unit's first column; those of its second row
/// are eight further.
#[derive(CubeType)]
pub struct Seen {
    pub from: i32,
    pub to: i32,
    /// None that exist are further.
    pub end: i32,
}

/// Those that see the key `row`, for a unit whose first column is `column`.
#[cube]
pub fn seen_by(part: &Part, row: u32, column: u32, #[comptime] plan: KeyGradientPlan) -> Seen {
    let place = row as i32 - part.sight.offset - column as i32;
    let mut from = BEFORE_ALL.runtime();
    if comptime![plan.variant.causal] {
        from = place;
    } else if comptime![plan.variant.window] {
        from = place + 1 - part.sight.window;
    }
    Seen { from, to: place + part.sight.window, end: part.sight.queries as i32 - column as i32 }
}

/// Hides the queries that do not see a unit's two keys; `block_start` is the block's first query.
#[cube]
pub fn hide(scores: &mut Array<f32>, seen: &Seen, block_start: i32, #[comptime] plan: KeyGradientPlan) {
    #[unroll]
    for half in 0..2usize {
        let further = comptime![(half * 8) as i32] - block_start;
        let from = seen.from + further;
        let mut to = seen.end - block_start;
        if comptime![plan.variant.window] {
            to = min(to, seen.to + further);
        }
        #[unroll]
        for i in 0..comptime![plan.block / 4] {
            let index = comptime![(i / 2) * 4 + half * 2 + i % 2];
            let query = comptime![((i / 2) * 8 + i % 2) as i32];
            scores[index] = select(query >= from, scores[index], HIDDEN);
            if comptime![plan.bounded()] {
                scores[index] = select(query < to, scores[index], HIDDEN);
            }
        }
    }
}
