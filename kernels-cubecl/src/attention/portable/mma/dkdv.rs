//! dK and dV: four planes of 16 keys each loop over the q blocks, head by head.
use super::tile::{self, Pair, ROWS, Strides, Vec8};
use crate::attention::portable::dropout::{self, DropoutParams};
use crate::attention::portable::exp::exp;
use crate::attention::portable::mask::{self, Plan, Sizes, VisibleRange};
use cubecl::prelude::*;

/// Queries of a q block.
pub const BLOCK: usize = 32;

/// `dk` and `dv` of [`portable::backward`](crate::attention::portable::backward). Cube `(kv block, key head, batch)`,
/// 128 units.
#[cube(launch_unchecked)]
pub fn mma_dkdv<E: Float>(
    q: &[Vec8<E>],
    k: &[Vec8<E>],
    v: &[Vec8<E>],
    dout: &[Vec8<E>],
    lse: &[f32],
    delta: &[f32],
    dk: &mut [Pair<E>],
    dv: &mut [Pair<E>],
    query_starts: &[i32],
    key_starts: &[i32],
    q_strides: &Strides,
    k_strides: &Strides,
    v_strides: &Strides,
    dout_strides: &Strides,
    dk_strides: &Strides,
    dv_strides: &Strides,
    sizes: &Sizes,
    dropout: &DropoutParams,
    scale: f32,
    #[comptime] plan: Plan,
) {
    let (kv_head, batch) = (CUBE_POS_Y, CUBE_POS_Z);
    let first = CUBE_POS_X * comptime![ROWS as u32];
    let mut k_tile = tile::tile::<E>(ROWS, plan.head_dim);
    let mut v_tile = tile::tile::<E>(ROWS, plan.value_dim);
    let mut q_tile = tile::tile::<E>(BLOCK, plan.head_dim);
    let mut dout_tile = tile::tile::<E>(BLOCK, plan.value_dim);
    tile::fill(&mut k_tile, k, k_strides, batch, kv_head, first, sizes.keys, ROWS, plan.head_dim);
    tile::fill(&mut v_tile, v, v_strides, batch, kv_head, first, sizes.keys, ROWS, plan.value_dim);

    let own = UNIT_POS / 32 * 16;
    let row = first + own + UNIT_POS % 32 / 4;
    let last = sizes.keys - 1;
    let upper = mask::visible_queries(first, query_starts, key_starts, sizes, plan);
    let bottom = min(first + comptime![ROWS as u32 - 1], last);
    let lower = mask::visible_queries(bottom, query_starts, key_starts, sizes, plan);
    let mut visible = Sequence::<VisibleRange>::new();
    #[unroll]
    for half in 0..2usize {
        let key = min(row + comptime![8 * half as u32], last);
        visible.push(mask::visible_queries(key, query_starts, key_starts, sizes, plan));
    }
    let mut acc_dk = tile::accumulators(plan.head_dim);
    let mut acc_dv = tile::accumulators(plan.value_dim);

    for nth_head in 0..sizes.group {
        let head = kv_head * sizes.group + nth_head;
        let statistics = (batch * CUBE_COUNT_Y * sizes.group + head) * sizes.statistics;
        let mut query = upper.first;
        while query < lower.end {
            sync_cube();
            tile::fill(&mut q_tile, q, q_strides, batch, head, query, sizes.queries, BLOCK, plan.head_dim);
            let end = sizes.queries;
            tile::fill(&mut dout_tile, dout, dout_strides, batch, head, query, end, BLOCK, plan.value_dim);
            sync_cube();
            let mut scores = tile::gemm_rows(&k_tile, own, &q_tile, BLOCK, plan.head_dim);
            let mut dp = tile::gemm_rows(&v_tile, own, &dout_tile, BLOCK, plan.value_dim);
            let column = query + UNIT_POS % 4 * 2;
            #[unroll]
            for nth in 0..comptime![BLOCK / 8] {
                #[unroll]
                for i in 0..2usize {
                    let at = column + comptime![(8 * nth + i) as u32];
                    let stats_index = (statistics + min(at, sizes.queries - 1)) as usize;
                    let (row_lse, row_delta) = (lse[stats_index], delta[stats_index]);
                    let row_keys = dropout::row_keys(dropout, batch, head, at);
                    #[unroll]
                    for half in 0..2usize {
                        let rows = visible.index(half);
                        let is_visible = at >= rows.first && at < rows.end;
                        let mut score = scores.index(nth)[half];
                        let mut dp_pair = dp.index(nth)[half];
                        let p = select(is_visible, exp::<f32>(score.extract(i) * scale - row_lse), 0.0);
                        let mut kept = p;
                        let mut dp_value = dp_pair.extract(i);
                        if comptime![plan.dropout] {
                            let keep = dropout::keep_factor(dropout, &row_keys, row + comptime![8 * half as u32]);
                            kept *= keep;
                            dp_value *= keep;
                        }
                        score.insert(i, kept);
                        dp_pair.insert(i, select(is_visible, p * (dp_value - row_delta), 0.0));
                        let registers = scores.index_mut(nth);
                        registers[half] = score;
                        let registers = dp.index_mut(nth);
                        registers[half] = dp_pair;
                    }
                }
            }
            tile::gemm_accumulate(&mut acc_dv, &scores, &dout_tile, BLOCK, plan.value_dim);
            tile::gemm_accumulate(&mut acc_dk, &dp, &q_tile, BLOCK, plan.head_dim);
            query += comptime![BLOCK as u32];
        }
    }

    let mut factors = Array::<f32>::new(2usize);
    factors[0] = 1.0;
    factors[1] = 1.0;
    tile::store(dv, dv_strides, &acc_dv, &factors, row, sizes.keys, batch, kv_head, plan.value_dim);
    factors[0] = scale;
    factors[1] = scale;
    tile::store(dk, dk_strides, &acc_dk, &factors, row, sizes.keys, batch, kv_head, plan.head_dim);
}
