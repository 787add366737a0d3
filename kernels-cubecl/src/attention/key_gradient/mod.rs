//! The gradients of the keys and values: 128 keys of one key head a cube, over the queries of the heads that share it.
//!
//! The products are taken transposed, keys as rows: what the softmax leaves in a warpgroup's registers then is the left
//! operand of the next product, and no score passes through shared memory. Long heads take two launches, one for each
//! gradient: the registers do not hold both sums.
mod mask;
mod plan;
mod step;

pub use plan::{Gradient, KeyGradientPlan};

use super::draw;
use super::query_walk;
use super::tile;
use super::variant::{Sizes, part};
use crate::hopper::mma::{self, Pair};
use crate::hopper::ring::barrier_at;
use crate::tiling::{KEY_ROWS, QueryBlocks};
use cubecl::prelude::*;
use half::bf16;
use mask::seen_by;
use step::{KeyState, Operands, Statistics, advance, load};

const LOG2_E: f32 = core::f32::consts::LOG2_E;

/// `k_gradient = scale · dSᵀ q` and `v_gradient = Pᵀ out_gradient` with `dS` and `P` as in
/// [`query_gradient`](super::query_gradient). 256 units; cube `(key head, sequence, block)`; boxes of 64 rows (`k`,
/// `v`), `block` rows (`q`, `out_gradient`), those for stores (the gradients), and `block` columns of all kinds of
/// `sums` and `drop_keys`.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn key_gradient(
    q: &TensorMap<bf16, Tiled>,
    k: &TensorMap<bf16, Tiled>,
    v: &TensorMap<bf16, Tiled>,
    out_gradient: &TensorMap<bf16, Tiled>,
    sums: &TensorMap<f32, Tiled>,
    drop_keys: &TensorMap<u32, Tiled>,
    query_starts: &[i32],
    key_starts: &[i32],
    k_gradient: &mut TensorMap<bf16, Tiled>,
    v_gradient: &mut TensorMap<bf16, Tiled>,
    sizes: Sizes,
    scale: f32,
    #[comptime] plan: KeyGradientPlan,
) {
    let variant = comptime![plan.variant];
    let (d, v_dim) = (variant.head_dim, variant.value_dim);
    let block = comptime![plan.block];
    let k_tile = comptime![mma::ROWS * variant.key_width() / 2];
    let v_tile = comptime![plan.value_tile()];

    let kv_head = CUBE_POS_X;
    let part = part(query_starts, key_starts, &sizes, variant.packed);
    // Causal keys further up have more queries: they start first.
    let first_key = CUBE_POS_Z * comptime![KEY_ROWS as u32];
    if comptime![variant.packed] {
        // The grid is as large as the longest sequence asks for.
        if first_key >= part.sight.keys {
            terminate!();
        }
    }

    let mut k_smem = Shared::<[Pair]>::new_aligned_slice(comptime![2 * k_tile], 1024usize);
    let fixed = Shared::<[u64]>::new_slice(1usize);
    if UNIT_POS == 0 {
        barrier_at(&fixed, 0usize).init_manual(1);
    }
    // Without the gradient of the keys, no values are needed: one line keeps the declaration.
    let mut v_smem = Shared::<[Pair]>::new_aligned_slice(comptime![usize::max(2 * v_tile, 32)], 1024usize);
    let mut q_ring = tile::ring(plan.stages, block, comptime![variant.key_width()]);
    let mut g_ring = tile::ring(plan.stages, block, comptime![variant.value_width()]);
    let sums_smem = Shared::<[f32]>::new_aligned_slice(comptime![plan.stages * plan.statistics()], 128usize);
    let draw_len = comptime![if variant.dropout { plan.stages * plan.statistics() } else { 32 }];
    let drop_smem = Shared::<[u32]>::new_aligned_slice(draw_len, 128usize);
    sync_async_proxy_shared();
    sync_cube();

    let blocks = QueryBlocks::new(
        first_key,
        &part.sight,
        comptime![block as u32],
        comptime![variant.causal],
        comptime![variant.window],
        comptime![plan.bounded()],
    );
    let source = query_walk::source(&part, &blocks, kv_head, &sizes);
    let role = plane_broadcast(UNIT_POS / 128, 0u32);
    let mut statistics = Statistics { sums: sums_smem, drop_keys: drop_smem };
    if UNIT_POS == 0 {
        let full = barrier_at(&fixed, 0usize);
        full.arrive_and_expect_tx(1, comptime![(4 * 2 * (k_tile + v_tile)) as u32]);
        #[unroll]
        for wg in 0..2usize {
            let row = (part.first_key + first_key) as i32 + comptime![(wg * mma::ROWS) as i32];
            let tile = k_smem.slice_mut(comptime![wg * k_tile], comptime![(wg + 1) * k_tile]);
            tile::fetch(&fixed, 0usize, tile, k, source.batch, kv_head as i32, row, mma::ROWS, d);
            if comptime![plan.keys()] {
                let tile = v_smem.slice_mut(comptime![wg * v_tile], comptime![(wg + 1) * v_tile]);
                tile::fetch(&fixed, 0usize, tile, v, source.batch, kv_head as i32, row, mma::ROWS, v_dim);
            }
        }
        // All but one stage; the steps keep that distance.
        for step in 0..u32::min(source.total, comptime![plan.stages as u32 - 1]) {
            load(&mut q_ring, &mut g_ring, &mut statistics, q, out_gradient, sums, drop_keys, &source, step, plan);
        }
    }

    let lane = UNIT_POS % 32;
    let row = first_key + role * 64 + ((UNIT_POS / 32) % 4) * 16 + lane / 4;
    let own = role as usize * k_tile;
    let own_v = role as usize * v_tile;
    let key_layout = comptime![mma::k_major(mma::ROWS, variant.key_width())];
    let at = Operands {
        k: mma::descriptor(k_smem.slice(own, own + k_tile), key_layout),
        v: mma::descriptor(
            v_smem.slice(own_v, own_v + v_tile),
            comptime![mma::k_major(mma::ROWS, variant.value_width())],
        ),
        q: mma::descriptor(q_ring.tiles.as_slice(), comptime![mma::k_major(block, variant.key_width())]),
        q_columns: mma::descriptor(q_ring.tiles.as_slice(), comptime![mma::mn_major(variant.key_width(), block)]),
        out_gradient: mma::descriptor(g_ring.tiles.as_slice(), comptime![mma::k_major(block, variant.value_width())]),
        out_gradient_columns: mma::descriptor(
            g_ring.tiles.as_slice(),
            comptime![mma::mn_major(variant.value_width(), block)],
        ),
    };
    let mut state = KeyState {
        scores: Array::new(comptime![block / 2]),
        slopes: Array::new(comptime![block / 2]),
        weights: tile::operand(block),
        operand: tile::operand(block),
        k_sum: Array::new(comptime![d / 2]),
        v_sum: Array::new(comptime![v_dim / 2]),
    };
    if comptime![plan.keys()] {
        mma::fill(&mut state.k_sum, 0.0, comptime![d / 2]);
    }
    if comptime![plan.values()] {
        mma::fill(&mut state.v_sum, 0.0, comptime![v_dim / 2]);
    }
    let scale_log2 = scale * LOG2_E;
    let seen = seen_by(&part, row, (lane % 4) * 2, plan);
    let number = draw::spread(sizes.first_key + part.first_key + row);

    barrier_at(&fixed, 0usize).wait_parity(0);
    // One loop over the blocks of all heads: the assembler lets no products overlap in a loop in a loop.
    let mut in_head = 0u32;
    let mut step = 0u32;
    loop {
        let block_start = (blocks.first + in_head) * comptime![block as u32];
        let mut edge = in_head < blocks.edge;
        if comptime![plan.bounded()] {
            edge = edge || in_head + blocks.high_edge >= source.steps;
        }
        advance(
            &mut state,
            &mut q_ring,
            &mut g_ring,
            &mut statistics,
            &source,
            &at,
            q,
            out_gradient,
            sums,
            drop_keys,
            step,
            scale_log2,
            edge,
            &seen,
            block_start as i32,
            number,
            plan,
        );
        in_head = select(in_head + 1 == source.steps, 0, in_head + 1);
        step += 1;
        if step == source.total {
            break;
        }
    }
    mma::wait(0usize);
    if comptime![plan.keys()] {
        mma::pin(&mut state.k_sum);
    }
    if comptime![plan.values()] {
        mma::pin(&mut state.v_sum);
    }
    // The key and value tiles are no longer needed and take the gradients.
    let mut factor = Array::<f32>::new(2usize);
    let at_row = first_key + role * 64;
    let (from, rows) = (part.first_key, part.sight.keys);
    if comptime![plan.values()] {
        if comptime![variant.dropout] {
            mma::fill(&mut factor, sizes.keep, 2usize);
        } else {
            mma::fill(&mut factor, 1.0, 2usize);
        }
        if comptime![plan.keys()] {
            let tile = v_smem.slice_mut(own_v, own_v + v_tile);
            let head = kv_head as i32;
            tile::store(&state.v_sum, &factor, tile, v_gradient, &part, head, from, at_row, rows, v_dim, variant);
        } else {
            let tile = k_smem.slice_mut(own, own + k_tile);
            let head = kv_head as i32;
            tile::store(&state.v_sum, &factor, tile, v_gradient, &part, head, from, at_row, rows, v_dim, variant);
        }
    }
    if comptime![plan.keys()] {
        mma::fill(&mut factor, scale, 2usize);
        let tile = k_smem.slice_mut(own, own + k_tile);
        let head = kv_head as i32;
        tile::store(&state.k_sum, &factor, tile, k_gradient, &part, head, from, at_row, rows, d, variant);
    }
}
