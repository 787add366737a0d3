//! The gradients of the keys and values: four planes of 16 keys each go through the queries block by block, head by
//! head.
use super::tile::{self, Pair, Place, ROWS, Vec8};
use crate::attention::portable::draw::{self, Draws};
use crate::attention::portable::exponential::exp;
use crate::attention::portable::sight::{self, Plan, Rows, Sizes};
use cubecl::prelude::*;

/// Queries of a step.
pub const BLOCK: usize = 32;

/// `dk` and `dv` of [`portable::backward`](crate::attention::portable::backward). Cube `(block of keys, key head,
/// batch)`, 128 units.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn mma_key_gradient<E: Float>(
    q: &[Vec8<E>],
    k: &[Vec8<E>],
    v: &[Vec8<E>],
    out_gradient: &[Vec8<E>],
    lse: &[f32],
    delta: &[f32],
    k_gradient: &mut [Pair<E>],
    v_gradient: &mut [Pair<E>],
    query_starts: &[i32],
    key_starts: &[i32],
    q_place: &Place,
    k_place: &Place,
    v_place: &Place,
    out_gradient_place: &Place,
    k_gradient_place: &Place,
    v_gradient_place: &Place,
    sizes: &Sizes,
    draws: &Draws,
    scale: f32,
    #[comptime] plan: Plan,
) {
    let (kv_head, batch) = (CUBE_POS_Y, CUBE_POS_Z);
    let first = CUBE_POS_X * comptime![ROWS as u32];
    let mut k_tile = tile::tile::<E>(ROWS, plan.head_dim);
    let mut v_tile = tile::tile::<E>(ROWS, plan.value_dim);
    let mut q_tile = tile::tile::<E>(BLOCK, plan.head_dim);
    let mut slope_tile = tile::tile::<E>(BLOCK, plan.value_dim);
    tile::fill(&mut k_tile, k, k_place, batch, kv_head, first, sizes.keys, ROWS, plan.head_dim);
    tile::fill(&mut v_tile, v, v_place, batch, kv_head, first, sizes.keys, ROWS, plan.value_dim);

    let own = UNIT_POS / 32 * 16;
    let row = first + own + UNIT_POS % 32 / 4;
    let last = sizes.keys - 1;
    let upper = sight::visible_queries(first, query_starts, key_starts, sizes, plan);
    let bottom = min(first + comptime![ROWS as u32 - 1], last);
    let lower = sight::visible_queries(bottom, query_starts, key_starts, sizes, plan);
    let mut seen = Sequence::<Rows>::new();
    #[unroll]
    for half in 0..2usize {
        let key = min(row + comptime![8 * half as u32], last);
        seen.push(sight::visible_queries(key, query_starts, key_starts, sizes, plan));
    }
    let mut key_sums = tile::accumulators(plan.head_dim);
    let mut value_sums = tile::accumulators(plan.value_dim);

    for nth_head in 0..sizes.group {
        let head = kv_head * sizes.group + nth_head;
        let statistics = (batch * CUBE_COUNT_Y * sizes.group + head) * sizes.statistics;
        let mut query = upper.first;
        while query < lower.end {
            sync_cube();
            tile::fill(&mut q_tile, q, q_place, batch, head, query, sizes.queries, BLOCK, plan.head_dim);
            let end = sizes.queries;
            tile::fill(
                &mut slope_tile,
                out_gradient,
                out_gradient_place,
                batch,
                head,
                query,
                end,
                BLOCK,
                plan.value_dim,
            );
            sync_cube();
            let mut scores = tile::product_with_rows(&k_tile, own, &q_tile, BLOCK, plan.head_dim);
            let mut pulls = tile::product_with_rows(&v_tile, own, &slope_tile, BLOCK, plan.value_dim);
            let column = query + UNIT_POS % 4 * 2;
            #[unroll]
            for nth in 0..comptime![BLOCK / 8] {
                #[unroll]
                for i in 0..2usize {
                    let at = column + comptime![(8 * nth + i) as u32];
                    let place = (statistics + min(at, sizes.queries - 1)) as usize;
                    let (log_total, share) = (lse[place], delta[place]);
                    let words = draw::row_words(draws, batch, head, at);
                    #[unroll]
                    for half in 0..2usize {
                        let rows = seen.index(half);
                        let is_seen = at >= rows.first && at < rows.end;
                        let mut score = scores.index(nth)[half];
                        let mut pull = pulls.index(nth)[half];
                        let weight = select(is_seen, exp::<f32>(score.extract(i) * scale - log_total), 0.0);
                        let mut kept = weight;
                        let mut pulled = pull.extract(i);
                        if comptime![plan.dropout] {
                            let keep = draw::keep(draws, &words, row + comptime![8 * half as u32]);
                            kept *= keep;
                            pulled *= keep;
                        }
                        score.insert(i, kept);
                        pull.insert(i, select(is_seen, weight * (pulled - share), 0.0));
                        let registers = scores.index_mut(nth);
                        registers[half] = score;
                        let registers = pulls.index_mut(nth);
                        registers[half] = pull;
                    }
                }
            }
            tile::add_product(&mut value_sums, &scores, &slope_tile, BLOCK, plan.value_dim);
            tile::add_product(&mut key_sums, &pulls, &q_tile, BLOCK, plan.head_dim);
            query += comptime![BLOCK as u32];
        }
    }

    let mut factors = Array::<f32>::new(2usize);
    factors[0] = 1.0;
    factors[1] = 1.0;
    tile::store(v_gradient, v_gradient_place, &value_sums, &factors, row, sizes.keys, batch, kv_head, plan.value_dim);
    factors[0] = scale;
    factors[1] = scale;
    tile::store(k_gradient, k_gradient_place, &key_sums, &factors, row, sizes.keys, batch, kv_head, plan.head_dim);
}
