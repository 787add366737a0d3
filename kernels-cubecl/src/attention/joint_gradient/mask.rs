//! Which queries see a unit's two keys.
use super::plan::{BLOCK, JointGradientPlan};
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
    /// So many with a window.
    pub count: u32,
    /// Queries of a packed sequence behind the unit's first column; none for a first row that is no key of it.
    pub end: i32,
    /// The same for the second row.
    pub second_end: i32,
}

/// Those that see the key `row`, for a unit whose first column is `column`.
#[cube]
pub fn seen_by(part: &Part, row: u32, column: u32, #[comptime] plan: JointGradientPlan) -> Seen {
    let variant = comptime![plan.variant];
    let place = row as i32 - part.sight.offset - column as i32;
    let mut from = BEFORE_ALL.runtime();
    let mut count = part.sight.window as u32;
    if comptime![variant.causal] {
        from = place;
    } else if comptime![variant.window] {
        from = place + 1 - part.sight.window;
        count = 2 * count - 1;
    }
    let end = part.sight.queries as i32 - column as i32;
    let mut first = end;
    let mut second = end;
    if comptime![variant.packed && !variant.causal] {
        // What follows the last key are the keys of the next sequence: their scores would reach the queries' gradients.
        // Causal queries do not see them.
        first = select(row < part.sight.keys, end, BEFORE_ALL);
        second = select(row + 8 < part.sight.keys, end, BEFORE_ALL);
    }
    Seen { from, count, end: first, second_end: second }
}

/// Hides the queries that do not see a unit's two keys; `block_start` is the block's first query.
#[cube]
pub fn hide(scores: &mut Array<f32>, seen: &Seen, block_start: i32, #[comptime] plan: JointGradientPlan) {
    let variant = comptime![plan.variant];
    let from = seen.from - block_start;
    #[unroll]
    for i in 0..comptime![BLOCK / 2] {
        let column = comptime![(8 * (i / 4) + i % 2) as i32];
        let second = comptime![(i / 2) % 2 == 1];
        // Column of this score, less the eight rows that the second row is further down.
        let query = comptime![if second { column - 8 } else { column }];
        if comptime![variant.window] {
            // One comparison for both ends: what lies before wraps around.
            scores[i] = select(((query - from) as u32) < seen.count, scores[i], HIDDEN);
        } else {
            scores[i] = select(query >= from, scores[i], HIDDEN);
        }
        if comptime![variant.packed] {
            let mut end = seen.end;
            if second {
                end = seen.second_end;
            }
            scores[i] = select(column < end - block_start, scores[i], HIDDEN);
        }
    }
}
