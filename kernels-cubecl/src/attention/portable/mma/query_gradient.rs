//! The gradient of the queries: four planes of 16 queries each go through the keys block by block.
use super::tile::{self, Pair, Place, ROWS, Vec8};
use crate::attention::portable::draw::{self, Draws, RowWords};
use crate::attention::portable::exponential::exp;
use crate::attention::portable::sight::{self, Plan, Rows, Sizes};
use cubecl::prelude::*;

/// Keys of a step.
pub const BLOCK: usize = 32;

/// `dq` of [`portable::backward`](crate::attention::portable::backward). Cube `(block of queries, head, batch)`, 128
/// units.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn mma_query_gradient<E: Float>(
    q: &[Vec8<E>],
    k: &[Vec8<E>],
    v: &[Vec8<E>],
    out_gradient: &[Vec8<E>],
    lse: &[f32],
    delta: &[f32],
    q_gradient: &mut [Pair<E>],
    query_starts: &[i32],
    key_starts: &[i32],
    q_place: &Place,
    k_place: &Place,
    v_place: &Place,
    out_gradient_place: &Place,
    q_gradient_place: &Place,
    sizes: &Sizes,
    draws: &Draws,
    scale: f32,
    #[comptime] plan: Plan,
) {
    let (head, batch) = (CUBE_POS_Y, CUBE_POS_Z);
    let kv_head = head / sizes.group;
    let rows = comptime![ROWS as u32];
    let first = ((sizes.queries - 1) / rows - CUBE_POS_X) * rows;
    let mut q_tile = tile::tile::<E>(ROWS, plan.head_dim);
    let mut slope_tile = tile::tile::<E>(ROWS, plan.value_dim);
    let mut k_tile = tile::tile::<E>(BLOCK, plan.head_dim);
    let mut v_tile = tile::tile::<E>(BLOCK, plan.value_dim);
    tile::fill(&mut q_tile, q, q_place, batch, head, first, sizes.queries, ROWS, plan.head_dim);
    let end = sizes.queries;
    tile::fill(&mut slope_tile, out_gradient, out_gradient_place, batch, head, first, end, ROWS, plan.value_dim);

    let own = UNIT_POS / 32 * 16;
    let row = first + own + UNIT_POS % 32 / 4;
    let last = sizes.queries - 1;
    let upper = sight::visible_keys(first, query_starts, key_starts, sizes, plan);
    let lower =
        sight::visible_keys(min(first + comptime![ROWS as u32 - 1], last), query_starts, key_starts, sizes, plan);
    let mut seen = Sequence::<Rows>::new();
    let mut words = Sequence::<RowWords>::new();
    let mut log_totals = Array::<f32>::new(2usize);
    let mut shares = Array::<f32>::new(2usize);
    #[unroll]
    for half in 0..2usize {
        let query = min(row + comptime![8 * half as u32], last);
        seen.push(sight::visible_keys(query, query_starts, key_starts, sizes, plan));
        words.push(draw::row_words(draws, batch, head, query));
        let place = ((batch * CUBE_COUNT_Y + head) * sizes.statistics + query) as usize;
        log_totals[half] = lse[place];
        shares[half] = delta[place];
    }
    let mut sums = tile::accumulators(plan.head_dim);

    let mut key = upper.first;
    while key < lower.end {
        sync_cube();
        tile::fill(&mut k_tile, k, k_place, batch, kv_head, key, sizes.keys, BLOCK, plan.head_dim);
        tile::fill(&mut v_tile, v, v_place, batch, kv_head, key, sizes.keys, BLOCK, plan.value_dim);
        sync_cube();
        let scores = tile::product_with_rows(&q_tile, own, &k_tile, BLOCK, plan.head_dim);
        let mut pulls = tile::product_with_rows(&slope_tile, own, &v_tile, BLOCK, plan.value_dim);
        let column = key + UNIT_POS % 4 * 2;
        #[unroll]
        for half in 0..2usize {
            let rows = seen.index(half);
            #[unroll]
            for nth in 0..comptime![BLOCK / 8] {
                let registers = pulls.index_mut(nth);
                let mut pair = registers[half];
                let scores = scores.index(nth)[half];
                #[unroll]
                for i in 0..2usize {
                    let at = column + comptime![(8 * nth + i) as u32];
                    let mut pull = pair.extract(i);
                    if comptime![plan.dropout] {
                        pull *= draw::keep(draws, words.index(half), at);
                    }
                    let weight = exp::<f32>(scores.extract(i) * scale - log_totals[half]);
                    pair.insert(i, select(at >= rows.first && at < rows.end, weight * (pull - shares[half]), 0.0));
                }
                registers[half] = pair;
            }
        }
        tile::add_product(&mut sums, &pulls, &k_tile, BLOCK, plan.head_dim);
        key += comptime![BLOCK as u32];
    }

    let mut factors = Array::<f32>::new(2usize);
    factors[0] = scale;
    factors[1] = scale;
    tile::store(q_gradient, q_gradient_place, &sums, &factors, row, sizes.queries, batch, head, plan.head_dim);
}
