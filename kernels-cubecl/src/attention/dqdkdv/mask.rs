//! The queries that may see a unit's two keys.
use super::plan::DqDkDvPlan;
use crate::attention::tile::MASKED;
use crate::attention::variant::CubeSequence;
use cubecl::prelude::*;

/// Less than every query index, and far from the least `i32`.
const BEFORE_ALL_QUERIES: i32 = -(1 << 30);

/// Range of queries that see the key in a unit's first accumulator row, relative to the unit's first column. For its
/// second row, eight keys further, the range is shifted by eight.
#[derive(CubeType)]
pub struct VisibleQueries {
    pub from: i32,
    /// Length of the range, with a window.
    pub count: u32,
    /// Queries of a packed sequence past the unit's first column; none if the first row is past the sequence's last
    /// key.
    pub end: i32,
    /// The same for the second row.
    pub second_end: i32,
}

/// The queries that see key `row`, for a unit whose first column is `column`.
#[cube]
pub fn visible_queries(sequence: &CubeSequence, row: u32, column: u32, #[comptime] plan: DqDkDvPlan) -> VisibleQueries {
    let variant = comptime![plan.variant];
    let query = row as i32 - sequence.mask.offset - column as i32;
    let mut from = BEFORE_ALL_QUERIES.runtime();
    let mut count = sequence.mask.window as u32;
    if comptime![variant.causal] {
        from = query;
    } else if comptime![variant.window] {
        from = query + 1 - sequence.mask.window;
        count = 2 * count - 1;
    }
    let end = sequence.mask.queries as i32 - column as i32;
    let mut first = end;
    let mut second = end;
    if comptime![variant.packed && !variant.causal] {
        // The rows after the last key are keys of the next sequence, and their scores would reach dQ. A causal mask
        // already hides them.
        first = select(row < sequence.mask.keys, end, BEFORE_ALL_QUERIES);
        second = select(row + 8 < sequence.mask.keys, end, BEFORE_ALL_QUERIES);
    }
    VisibleQueries { from, count, end: first, second_end: second }
}

/// Masks the scores of queries that do not see a unit's two keys; `block_start` is the first query of the block.
#[cube]
pub fn apply_mask(scores: &mut Array<f32>, visible: &VisibleQueries, block_start: i32, #[comptime] plan: DqDkDvPlan) {
    let variant = comptime![plan.variant];
    let from = visible.from - block_start;
    #[unroll]
    for i in 0..comptime![plan.block() / 2] {
        let column = comptime![(8 * (i / 4) + i % 2) as i32];
        let second = comptime![(i / 2) % 2 == 1];
        // Column of this score, less the eight keys between the two rows.
        let query = comptime![if second { column - 8 } else { column }];
        if comptime![variant.window] {
            // One comparison for both ends: a negative difference wraps around.
            scores[i] = select(((query - from) as u32) < visible.count, scores[i], MASKED);
        } else {
            scores[i] = select(query >= from, scores[i], MASKED);
        }
        if comptime![variant.packed] {
            let mut end = visible.end;
            if second {
                end = visible.second_end;
            }
            scores[i] = select(column < end - block_start, scores[i], MASKED);
        }
    }
}
