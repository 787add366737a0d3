//! The queries that may see a unit's two keys.
use super::DkDvPlan;
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
    pub to: i32,
    /// End of the sequence.
    pub end: i32,
}

/// The queries that see key `row`, for a unit whose first column is `column`.
#[cube]
pub fn visible_queries(sequence: &CubeSequence, row: u32, column: u32, #[comptime] plan: DkDvPlan) -> VisibleQueries {
    let query = row as i32 - sequence.mask.offset - column as i32;
    let mut from = BEFORE_ALL_QUERIES.runtime();
    if comptime![plan.variant.causal] {
        from = query;
    } else if comptime![plan.variant.window] {
        from = query + 1 - sequence.mask.window;
    }
    VisibleQueries { from, to: query + sequence.mask.window, end: sequence.mask.queries as i32 - column as i32 }
}

/// Masks the scores of queries that do not see a unit's two keys; `block_start` is the first query of the block.
#[cube]
pub fn apply_mask(scores: &mut Array<f32>, visible: &VisibleQueries, block_start: i32, #[comptime] plan: DkDvPlan) {
    #[unroll]
    for half in 0..2usize {
        let further = comptime![(half * 8) as i32] - block_start;
        let from = visible.from + further;
        let mut to = visible.end - block_start;
        if comptime![plan.variant.window] {
            to = min(to, visible.to + further);
        }
        #[unroll]
        for i in 0..comptime![plan.block / 4] {
            let index = comptime![(i / 2) * 4 + half * 2 + i % 2];
            let query = comptime![((i / 2) * 8 + i % 2) as i32];
            scores[index] = select(query >= from, scores[index], MASKED);
            if comptime![plan.bounded()] {
                scores[index] = select(query < to, scores[index], MASKED);
            }
        }
    }
}
