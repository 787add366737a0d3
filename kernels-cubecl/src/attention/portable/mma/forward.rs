//! The forward kernel: four planes of 16 queries each go through the keys block by block.
use super::tile::{self, Pair, Place, ROWS, Sums, Vec8};
use crate::attention::portable::draw::{self, Draws, RowWords};
use crate::attention::portable::exponential::{exp, ln};
use crate::attention::portable::sight::{self, Plan, Rows, Sizes};
use cubecl::prelude::*;

/// A score that is not seen.
const HIDDEN: f32 = -1.0e30;

/// Keys of a step.
pub fn block(head_dim: usize, value_dim: usize) -> usize {
    if head_dim.max(value_dim) <= 128 { 64 } else { 32 }
}

/// What [`portable::forward`](crate::attention::portable::forward) gives. Cube `(block of queries, head, batch)`, 128
/// units.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn mma_forward<E: Float>(
    q: &[Vec8<E>],
    k: &[Vec8<E>],
    v: &[Vec8<E>],
    out: &mut [Pair<E>],
    lse: &mut [f32],
    query_starts: &[i32],
    key_starts: &[i32],
    q_place: &Place,
    k_place: &Place,
    v_place: &Place,
    out_place: &Place,
    sizes: &Sizes,
    draws: &Draws,
    scale: f32,
    #[comptime] plan: Plan,
) {
    let block = comptime![block(plan.head_dim, plan.value_dim)];
    let (head, batch) = (CUBE_POS_Y, CUBE_POS_Z);
    let kv_head = head / sizes.group;
    // Causal rows further down have more work: they start first.
    let rows = comptime![ROWS as u32];
    let first = ((sizes.queries - 1) / rows - CUBE_POS_X) * rows;
    let mut q_tile = tile::tile::<E>(ROWS, plan.head_dim);
    let mut k_tile = tile::tile::<E>(block, plan.head_dim);
    let mut v_tile = tile::tile::<E>(block, plan.value_dim);
    tile::fill(&mut q_tile, q, q_place, batch, head, first, sizes.queries, ROWS, plan.head_dim);

    let plane = UNIT_POS / 32;
    let own = plane * 16;
    let row = first + own + UNIT_POS % 32 / 4;
    let last = sizes.queries - 1;
    // First and last keys rise from row to row.
    let upper = sight::visible_keys(first, query_starts, key_starts, sizes, plan);
    let lower =
        sight::visible_keys(min(first + comptime![ROWS as u32 - 1], last), query_starts, key_starts, sizes, plan);
    let mut seen = Sequence::<Rows>::new();
    let mut words = Sequence::<RowWords>::new();
    #[unroll]
    for half in 0..2usize {
        let query = min(row + comptime![8 * half as u32], last);
        seen.push(sight::visible_keys(query, query_starts, key_starts, sizes, plan));
        words.push(draw::row_words(draws, batch, head, query));
    }
    let mut sums = tile::accumulators(plan.value_dim);
    let mut top = Array::<f32>::new(2usize);
    let mut total = Array::<f32>::new(2usize);
    #[unroll]
    for half in 0..2usize {
        top[half] = HIDDEN;
        total[half] = 0.0;
    }

    let mut key = upper.first;
    while key < lower.end {
        sync_cube();
        tile::fill(&mut k_tile, k, k_place, batch, kv_head, key, sizes.keys, block, plan.head_dim);
        tile::fill(&mut v_tile, v, v_place, batch, kv_head, key, sizes.keys, block, plan.value_dim);
        sync_cube();
        let mut scores = tile::product_with_rows(&q_tile, own, &k_tile, block, plan.head_dim);
        let column = key + UNIT_POS % 4 * 2;
        #[unroll]
        for half in 0..2usize {
            let rows = seen.index(half);
            let mut highest = top[half];
            #[unroll]
            for nth in 0..comptime![block / 8] {
                let mut pair = scores.index(nth)[half];
                #[unroll]
                for i in 0..2usize {
                    let at = column + comptime![(8 * nth + i) as u32];
                    let score = select(at >= rows.first && at < rows.end, pair.extract(i) * scale, HIDDEN);
                    pair.insert(i, score);
                    highest = max(highest, score);
                }
                let registers = scores.index_mut(nth);
                registers[half] = pair;
            }
            highest = max(highest, plane_shuffle_xor(highest, 1u32));
            highest = max(highest, plane_shuffle_xor(highest, 2u32));
            let factor = exp::<f32>(top[half] - highest);
            top[half] = highest;
            let mut more = total[half] * factor;
            #[unroll]
            for nth in 0..comptime![block / 8] {
                let mut pair = scores.index(nth)[half];
                #[unroll]
                for i in 0..2usize {
                    let score = pair.extract(i);
                    // While a row has seen no key its highest score is as low as a hidden one.
                    let mut weight = select(score > 0.5 * HIDDEN, exp::<f32>(score - highest), 0.0);
                    more += weight;
                    if comptime![plan.dropout] {
                        let at = column + comptime![(8 * nth + i) as u32];
                        weight *= draw::keep(draws, words.index(half), at);
                    }
                    pair.insert(i, weight);
                }
                let registers = scores.index_mut(nth);
                registers[half] = pair;
            }
            total[half] = more;
            scale_row(&mut sums, half, factor, plan.value_dim);
        }
        tile::add_product(&mut sums, &scores, &v_tile, block, plan.value_dim);
        key += comptime![block as u32];
    }

    let mut factors = Array::<f32>::new(2usize);
    #[unroll]
    for half in 0..2usize {
        // Each row's total is spread over four units.
        let all = total[half] + plane_shuffle_xor(total[half], 1u32);
        let all = all + plane_shuffle_xor(all, 2u32);
        let is_seen = all > 0.0;
        let divisor = select(is_seen, all, 1.0);
        factors[half] = 1.0 / divisor;
        let query = row + comptime![8 * half as u32];
        if UNIT_POS % 4 == 0 && query < sizes.queries {
            let place = ((batch * CUBE_COUNT_Y + head) * sizes.statistics + query) as usize;
            lse[place] = select(is_seen, top[half] + ln::<f32>(divisor), f32::NEG_INFINITY);
        }
    }
    tile::store(out, out_place, &sums, &factors, row, sizes.queries, batch, head, plan.value_dim);
}

/// Multiplies one of a unit's two rows.
#[cube]
fn scale_row(sums: &mut Sequence<Array<Sums>>, #[comptime] half: usize, factor: f32, #[comptime] length: usize) {
    #[unroll]
    for nth in 0..comptime![length / 8] {
        let registers = sums.index_mut(nth);
        let before = registers[half];
        let mut after = Sums::empty();
        after.insert(0usize, before.extract(0usize) * factor);
        after.insert(1usize, before.extract(1usize) * factor);
        registers[half] = after;
    }
}
