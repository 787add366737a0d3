//! The forward kernel: four planes of 16 queries each loop over the kv blocks.
use super::tile::{self, Acc2, Pair, ROWS, Strides, Vec8};
use crate::attention::portable::dropout::{self, DropoutParams, RowKeys};
use crate::attention::portable::exp::{exp, ln};
use crate::attention::portable::mask::{self, Plan, Sizes, VisibleRange};
use cubecl::prelude::*;

/// A masked score.
const MASKED: f32 = -1.0e30;

/// Keys of a kv block.
pub fn block(head_dim: usize, value_dim: usize) -> usize {
    if head_dim.max(value_dim) <= 128 { 64 } else { 32 }
}

/// Output and log-sum-exp of [`portable::forward`](crate::attention::portable::forward). Cube `(q block, head, batch)`,
/// 128 units.
#[cube(launch_unchecked)]
pub fn mma_forward<E: Float>(
    q: &[Vec8<E>],
    k: &[Vec8<E>],
    v: &[Vec8<E>],
    out: &mut [Pair<E>],
    lse: &mut [f32],
    query_starts: &[i32],
    key_starts: &[i32],
    q_strides: &Strides,
    k_strides: &Strides,
    v_strides: &Strides,
    out_strides: &Strides,
    sizes: &Sizes,
    dropout: &DropoutParams,
    scale: f32,
    #[comptime] plan: Plan,
) {
    let block = comptime![block(plan.head_dim, plan.value_dim)];
    let (head, batch) = (CUBE_POS_Y, CUBE_POS_Z);
    let kv_head = head / sizes.group;
    // With a causal mask the last queries see the most keys: they start first.
    let rows = comptime![ROWS as u32];
    let first = ((sizes.queries - 1) / rows - CUBE_POS_X) * rows;
    let mut q_tile = tile::tile::<E>(ROWS, plan.head_dim);
    let mut k_tile = tile::tile::<E>(block, plan.head_dim);
    let mut v_tile = tile::tile::<E>(block, plan.value_dim);
    tile::fill(&mut q_tile, q, q_strides, batch, head, first, sizes.queries, ROWS, plan.head_dim);

    let plane = UNIT_POS / 32;
    let own = plane * 16;
    let row = first + own + UNIT_POS % 32 / 4;
    let last = sizes.queries - 1;
    // The ends of the visible range never decrease from query to query.
    let upper = mask::visible_keys(first, query_starts, key_starts, sizes, plan);
    let lower =
        mask::visible_keys(min(first + comptime![ROWS as u32 - 1], last), query_starts, key_starts, sizes, plan);
    let mut visible = Sequence::<VisibleRange>::new();
    let mut row_keys = Sequence::<RowKeys>::new();
    #[unroll]
    for half in 0..2usize {
        let query = min(row + comptime![8 * half as u32], last);
        visible.push(mask::visible_keys(query, query_starts, key_starts, sizes, plan));
        row_keys.push(dropout::row_keys(dropout, batch, head, query));
    }
    let mut acc = tile::accumulators(plan.value_dim);
    let mut row_max = Array::<f32>::new(2usize);
    let mut row_sum = Array::<f32>::new(2usize);
    #[unroll]
    for half in 0..2usize {
        row_max[half] = MASKED;
        row_sum[half] = 0.0;
    }

    let mut key = upper.first;
    while key < lower.end {
        sync_cube();
        tile::fill(&mut k_tile, k, k_strides, batch, kv_head, key, sizes.keys, block, plan.head_dim);
        tile::fill(&mut v_tile, v, v_strides, batch, kv_head, key, sizes.keys, block, plan.value_dim);
        sync_cube();
        let mut scores = tile::gemm_rows(&q_tile, own, &k_tile, block, plan.head_dim);
        let column = key + UNIT_POS % 4 * 2;
        #[unroll]
        for half in 0..2usize {
            let rows = visible.index(half);
            let mut new_max = row_max[half];
            #[unroll]
            for nth in 0..comptime![block / 8] {
                let mut pair = scores.index(nth)[half];
                #[unroll]
                for i in 0..2usize {
                    let at = column + comptime![(8 * nth + i) as u32];
                    let score = select(at >= rows.first && at < rows.end, pair.extract(i) * scale, MASKED);
                    pair.insert(i, score);
                    new_max = max(new_max, score);
                }
                let registers = scores.index_mut(nth);
                registers[half] = pair;
            }
            new_max = max(new_max, plane_shuffle_xor(new_max, 1u32));
            new_max = max(new_max, plane_shuffle_xor(new_max, 2u32));
            let factor = exp::<f32>(row_max[half] - new_max);
            row_max[half] = new_max;
            let mut more = row_sum[half] * factor;
            #[unroll]
            for nth in 0..comptime![block / 8] {
                let mut pair = scores.index(nth)[half];
                #[unroll]
                for i in 0..2usize {
                    let score = pair.extract(i);
                    // While a row has seen no visible key, its greatest score is a masked one.
                    let mut p = select(score > 0.5 * MASKED, exp::<f32>(score - new_max), 0.0);
                    more += p;
                    if comptime![plan.dropout] {
                        let at = column + comptime![(8 * nth + i) as u32];
                        p *= dropout::keep_factor(dropout, row_keys.index(half), at);
                    }
                    pair.insert(i, p);
                }
                let registers = scores.index_mut(nth);
                registers[half] = pair;
            }
            row_sum[half] = more;
            scale_row(&mut acc, half, factor, plan.value_dim);
        }
        tile::gemm_accumulate(&mut acc, &scores, &v_tile, block, plan.value_dim);
        key += comptime![block as u32];
    }

    let mut factors = Array::<f32>::new(2usize);
    #[unroll]
    for half in 0..2usize {
        // Each row's sum is spread over four units.
        let all = row_sum[half] + plane_shuffle_xor(row_sum[half], 1u32);
        let all = all + plane_shuffle_xor(all, 2u32);
        let is_visible = all > 0.0;
        let divisor = select(is_visible, all, 1.0);
        factors[half] = 1.0 / divisor;
        let query = row + comptime![8 * half as u32];
        if UNIT_POS % 4 == 0 && query < sizes.queries {
            let stats_index = ((batch * CUBE_COUNT_Y + head) * sizes.statistics + query) as usize;
            lse[stats_index] = select(is_visible, row_max[half] + ln::<f32>(divisor), f32::NEG_INFINITY);
        }
    }
    tile::store(out, out_strides, &acc, &factors, row, sizes.queries, batch, head, plan.value_dim);
}

/// Multiplies one of a unit's two rows by `factor`.
#[cube]
fn scale_row(acc: &mut Sequence<Array<Acc2>>, #[comptime] half: usize, factor: f32, #[comptime] length: usize) {
    #[unroll]
    for nth in 0..comptime![length / 8] {
        let registers = acc.index_mut(nth);
        let before = registers[half];
        let mut after = Acc2::empty();
        after.insert(0usize, before.extract(0usize) * factor);
        after.insert(1usize, before.extract(1usize) * factor);
        registers[half] = after;
    }
}
