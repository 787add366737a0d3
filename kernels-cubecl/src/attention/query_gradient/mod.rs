//! The gradient of the queries: like the forward kernel, 128 query rows a cube, over the key blocks they see.
mod plan;
mod step;

pub use plan::QueryGradientPlan;

use super::tile;
use super::variant::{Sizes, part};
use super::walk::{self, Fixed, Place};
use crate::hopper::mma::{self, Pair};
use crate::hopper::ring::barrier_at;
use cubecl::prelude::*;
use half::bf16;
use step::{Operands, RowState, advance};

const LOG2_E: f32 = core::f32::consts::LOG2_E;

/// `q_gradient = scale · dS k` with `dS = P ∘ (out_gradient vᵀ - delta)` and `P = exp(q kᵀ · scale - lse)`; with
/// dropout the product in the brackets is multiplied with 0 or `keep`. 256 units; cube `(head, sequence, block)`; boxes
/// of 64 rows (`q`, `out_gradient`), `block` rows (`k`, `v`) and those for stores (`q_gradient`). `sums` is what
/// [`super::delta`] leaves.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn query_gradient(
    q: &TensorMap<bf16, Tiled>,
    k: &TensorMap<bf16, Tiled>,
    v: &TensorMap<bf16, Tiled>,
    out_gradient: &TensorMap<bf16, Tiled>,
    sums: &[f32],
    drop_keys: &[u32],
    query_starts: &[i32],
    key_starts: &[i32],
    q_gradient: &mut TensorMap<bf16, Tiled>,
    sizes: Sizes,
    scale: f32,
    #[comptime] plan: QueryGradientPlan,
) {
    let variant = comptime![plan.variant];
    let (d, v_dim) = (variant.head_dim, variant.value_dim);
    let block = comptime![plan.block];
    let q_tile = comptime![mma::ROWS * variant.key_width() / 2];
    let g_tile = comptime![mma::ROWS * variant.value_width() / 2];

    let head = CUBE_POS_X;
    let part = part(query_starts, key_starts, &sizes, variant.packed);
    walk::leave_behind_the_end(&part, variant);

    let mut q_smem = Shared::<[Pair]>::new_aligned_slice(comptime![2 * q_tile], 1024usize);
    let mut g_smem = Shared::<[Pair]>::new_aligned_slice(comptime![2 * g_tile], 1024usize);
    let fixed = Shared::<[u64]>::new_slice(1usize);
    if UNIT_POS == 0 {
        barrier_at(&fixed, 0usize).init_manual(1);
    }
    let mut k_ring = tile::ring(plan.stages, block, comptime![variant.key_width()]);
    let mut v_ring = tile::ring(plan.stages, block, comptime![variant.value_width()]);
    sync_async_proxy_shared();
    sync_cube();

    let first_row = walk::first_row(&part, variant);
    let blocks = walk::blocks(first_row, &part, block, variant);
    let source = walk::source(&part, &blocks, head, &sizes);
    let count = source.count;
    let role = plane_broadcast(UNIT_POS / 128, 0u32);
    if UNIT_POS == 0 {
        let full = barrier_at(&fixed, 0usize);
        full.arrive_and_expect_tx(1, comptime![(4 * 2 * (q_tile + g_tile)) as u32]);
        #[unroll]
        for wg in 0..2usize {
            let row = (part.first_query + first_row) as i32 + comptime![(wg * mma::ROWS) as i32];
            let tile = q_smem.slice_mut(comptime![wg * q_tile], comptime![(wg + 1) * q_tile]);
            tile::fetch(&fixed, 0usize, tile, q, source.batch, head as i32, row, mma::ROWS, d);
            let tile = g_smem.slice_mut(comptime![wg * g_tile], comptime![(wg + 1) * g_tile]);
            tile::fetch(&fixed, 0usize, tile, out_gradient, source.batch, head as i32, row, mma::ROWS, v_dim);
        }
        // All but one stage; the steps keep that distance.
        for step in 0..u32::min(count, comptime![plan.stages as u32 - 1]) {
            walk::load(&mut k_ring, k, &source, step, d, block, plan.stages);
            walk::load(&mut v_ring, v, &source, step, v_dim, block, plan.stages);
        }
    }

    let lane = UNIT_POS % 32;
    let row = first_row + role * 64 + ((UNIT_POS / 32) % 4) * 16 + lane / 4;
    let own = role as usize * q_tile;
    let own_g = role as usize * g_tile;
    let at = Operands {
        q: mma::descriptor(q_smem.slice(own, own + q_tile), comptime![mma::k_major(mma::ROWS, variant.key_width())]),
        out_gradient: mma::descriptor(
            g_smem.slice(own_g, own_g + g_tile),
            comptime![mma::k_major(mma::ROWS, variant.value_width())],
        ),
        k: mma::descriptor(k_ring.tiles.as_slice(), comptime![mma::k_major(block, variant.key_width())]),
        k_columns: mma::descriptor(k_ring.tiles.as_slice(), comptime![mma::mn_major(variant.key_width(), block)]),
        v: mma::descriptor(v_ring.tiles.as_slice(), comptime![mma::k_major(block, variant.value_width())]),
    };
    let statistics = (part.batch as u32 * CUBE_COUNT_X + head) * sizes.stride + part.first_query;
    let mut state = RowState {
        scores: Array::new(comptime![block / 2]),
        slopes: Array::new(comptime![block / 2]),
        operand: tile::operand(block),
        sum: Array::new(comptime![d / 2]),
        shift: Array::new(2usize),
        delta: Array::new(2usize),
        draws: tile::draws(drop_keys, statistics, row, part.sight.queries, sizes.statistics, variant.dropout),
    };
    mma::fill(&mut state.sum, 0.0, comptime![d / 2]);
    #[unroll]
    for half in 0..2usize {
        let mut at = row + comptime![(half * 8) as u32];
        if comptime![variant.packed] {
            at = u32::min(at, part.sight.queries - 1);
        }
        state.shift[half] = sums[(statistics + at) as usize];
        state.delta[half] = sums[(sizes.statistics + statistics + at) as usize];
    }
    let scale_log2 = scale * LOG2_E;
    let place = Place { role, row, column: (lane % 4) * 2 };
    let steps = Fixed::<Operands> { place, part, source, at, scale_log2 };

    barrier_at(&fixed, 0usize).wait_parity(0);
    // Two copies of a step, one without masks, save some of its time; long heads lack the registers.
    if comptime![variant.window || d > 128] {
        let mut step = 0u32;
        loop {
            let edge = step < blocks.edge || step + blocks.low_edge >= count;
            advance(&mut state, &mut k_ring, &mut v_ring, &steps, k, v, step, edge, plan);
            step += 1;
            if step == count {
                break;
            }
        }
    } else {
        for step in 0..blocks.edge {
            advance(&mut state, &mut k_ring, &mut v_ring, &steps, k, v, step, true, plan);
        }
        for step in blocks.edge..count {
            advance(&mut state, &mut k_ring, &mut v_ring, &steps, k, v, step, false, plan);
        }
    }
    mma::wait(0usize);
    mma::pin(&mut state.sum);
    mma::fill(&mut state.shift, scale, 2usize);
    // The query tile is no longer needed and takes the gradient.
    let tile = q_smem.slice_mut(own, own + q_tile);
    tile::store(
        &state.sum,
        &state.shift,
        tile,
        q_gradient,
        &steps.part,
        head as i32,
        steps.part.first_query,
        first_row + role * 64,
        steps.part.sight.queries,
        d,
        variant,
    );
}
