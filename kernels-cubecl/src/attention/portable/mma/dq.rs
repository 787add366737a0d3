//! dQ: four planes of 16 queries each loop over the kv blocks.
use super::tile::{self, Pair, ROWS, Strides, Vec8};
use crate::attention::portable::dropout::{self, DropoutParams, RowKeys};
use crate::attention::portable::exp::exp;
use crate::attention::portable::mask::{self, Plan, Sizes, VisibleRange};
use cubecl::prelude::*;

/// Keys of a kv block.
pub const BLOCK: usize = 32;

/// `dq` of [`portable::backward`](crate::attention::portable::backward). Cube `(q block, head, batch)`, 128 units.
#[cube(launch_unchecked)]
pub fn mma_dq<E: Float>(
    q: &[Vec8<E>],
    k: &[Vec8<E>],
    v: &[Vec8<E>],
    dout: &[Vec8<E>],
    lse: &[f32],
    delta: &[f32],
    dq: &mut [Pair<E>],
    query_starts: &[i32],
    key_starts: &[i32],
    q_strides: &Strides,
    k_strides: &Strides,
    v_strides: &Strides,
    dout_strides: &Strides,
    dq_strides: &Strides,
    sizes: &Sizes,
    dropout: &DropoutParams,
    scale: f32,
    #[comptime] plan: Plan,
) {
    let (head, batch) = (CUBE_POS_Y, CUBE_POS_Z);
    let kv_head = head / sizes.group;
    let rows = comptime![ROWS as u32];
    let first = ((sizes.queries - 1) / rows - CUBE_POS_X) * rows;
    let mut q_tile = tile::tile::<E>(ROWS, plan.head_dim);
    let mut dout_tile = tile::tile::<E>(ROWS, plan.value_dim);
    let mut k_tile = tile::tile::<E>(BLOCK, plan.head_dim);
    let mut v_tile = tile::tile::<E>(BLOCK, plan.value_dim);
    tile::fill(&mut q_tile, q, q_strides, batch, head, first, sizes.queries, ROWS, plan.head_dim);
    let end = sizes.queries;
    tile::fill(&mut dout_tile, dout, dout_strides, batch, head, first, end, ROWS, plan.value_dim);

    let own = UNIT_POS / 32 * 16;
    let row = first + own + UNIT_POS % 32 / 4;
    let last = sizes.queries - 1;
    let upper = mask::visible_keys(first, query_starts, key_starts, sizes, plan);
    let lower =
        mask::visible_keys(min(first + comptime![ROWS as u32 - 1], last), query_starts, key_starts, sizes, plan);
    let mut visible = Sequence::<VisibleRange>::new();
    let mut row_keys = Sequence::<RowKeys>::new();
    let mut row_lse = Array::<f32>::new(2usize);
    let mut delta_of_rows = Array::<f32>::new(2usize);
    #[unroll]
    for half in 0..2usize {
        let query = min(row + comptime![8 * half as u32], last);
        visible.push(mask::visible_keys(query, query_starts, key_starts, sizes, plan));
        row_keys.push(dropout::row_keys(dropout, batch, head, query));
        let stats_index = ((batch * CUBE_COUNT_Y + head) * sizes.statistics + query) as usize;
        row_lse[half] = lse[stats_index];
        delta_of_rows[half] = delta[stats_index];
    }
    let mut acc = tile::accumulators(plan.head_dim);

    let mut key = upper.first;
    while key < lower.end {
        sync_cube();
        tile::fill(&mut k_tile, k, k_strides, batch, kv_head, key, sizes.keys, BLOCK, plan.head_dim);
        tile::fill(&mut v_tile, v, v_strides, batch, kv_head, key, sizes.keys, BLOCK, plan.value_dim);
        sync_cube();
        let scores = tile::gemm_rows(&q_tile, own, &k_tile, BLOCK, plan.head_dim);
        let mut dp = tile::gemm_rows(&dout_tile, own, &v_tile, BLOCK, plan.value_dim);
        let column = key + UNIT_POS % 4 * 2;
        #[unroll]
        for half in 0..2usize {
            let rows = visible.index(half);
            #[unroll]
            for nth in 0..comptime![BLOCK / 8] {
                let registers = dp.index_mut(nth);
                let mut pair = registers[half];
                let scores = scores.index(nth)[half];
                #[unroll]
                for i in 0..2usize {
                    let at = column + comptime![(8 * nth + i) as u32];
                    let mut dp_pair = pair.extract(i);
                    if comptime![plan.dropout] {
                        dp_pair *= dropout::keep_factor(dropout, row_keys.index(half), at);
                    }
                    let p = exp::<f32>(scores.extract(i) * scale - row_lse[half]);
                    pair.insert(i, select(at >= rows.first && at < rows.end, p * (dp_pair - delta_of_rows[half]), 0.0));
                }
                registers[half] = pair;
            }
        }
        tile::gemm_accumulate(&mut acc, &dp, &k_tile, BLOCK, plan.head_dim);
        key += comptime![BLOCK as u32];
    }

    let mut factors = Array::<f32>::new(2usize);
    factors[0] = scale;
    factors[1] = scale;
    tile::store(dq, dq_strides, &acc, &factors, row, sizes.queries, batch, head, plan.head_dim);
}
