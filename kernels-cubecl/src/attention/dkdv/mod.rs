//! dK and dV: a cube has 128 keys of one key head and loops over the q blocks of all query heads that share it.
//!
//! The scores are computed transposed (Sᵀ = K Qᵀ), so that P and dS leave the softmax in the registers of the next
//! GEMM's left operand, and no score passes through shared memory. Above head_dim 128 the registers do not hold both
//! accumulators: one launch computes dV, another dK.
mod mask;
mod plan;
mod step;

pub use plan::{DkDvOutputs, DkDvPlan};

use super::variant::{Sizes, cube_sequence};
use super::{dropout, q_blocks, tile};
use crate::hopper::barrier::barrier_at;
use crate::hopper::mma::{self, Pair};
use crate::tiling::{CUBE_KEYS, QBlocks};
use cubecl::prelude::*;
use half::bf16;
use mask::visible_queries;
use step::{Descriptors, DkDvState, StatsRing, advance, load};

const LOG2_E: f32 = core::f32::consts::LOG2_E;

/// `dk = scale · dSᵀ q` and `dv = Pᵀ dout` with `dS` and `P` as in [`dq`](super::dq). 256 units; cube `(key head,
/// sequence, kv block)`; tensor maps with boxes of 64 rows (`k`, `v`), `block` rows (`q`, `dout`), those for stores
/// (`dk`, `dv`), and `block` columns of both kinds of `lse_delta` and `dropout_keys`.
#[cube(launch_unchecked)]
pub fn attention_dkdv(
    q: &TensorMap<bf16, Tiled>,
    k: &TensorMap<bf16, Tiled>,
    v: &TensorMap<bf16, Tiled>,
    dout: &TensorMap<bf16, Tiled>,
    lse_delta: &TensorMap<f32, Tiled>,
    dropout_keys: &TensorMap<u32, Tiled>,
    query_starts: &[i32],
    key_starts: &[i32],
    dk: &mut TensorMap<bf16, Tiled>,
    dv: &mut TensorMap<bf16, Tiled>,
    sizes: Sizes,
    scale: f32,
    #[comptime] plan: DkDvPlan,
) {
    let variant = comptime![plan.variant];
    let (d, v_dim) = (variant.head_dim, variant.value_dim);
    let block = comptime![plan.block];
    let k_tile = comptime![mma::ROWS * variant.key_width() / 2];
    let v_tile = comptime![plan.v_tile()];

    let kv_head = CUBE_POS_X;
    let sequence = cube_sequence(query_starts, key_starts, &sizes, variant.packed);
    // With a causal mask the first keys are seen by the most queries: they start first.
    let first_key = CUBE_POS_Z * comptime![CUBE_KEYS as u32];
    if comptime![variant.packed] {
        // The grid is sized for the longest sequence.
        if first_key >= sequence.mask.keys {
            terminate!();
        }
    }

    let mut k_smem = Shared::<[Pair]>::new_aligned_slice(comptime![2 * k_tile], 1024usize);
    let kv_full = Shared::<[u64]>::new_slice(1usize);
    if UNIT_POS == 0 {
        barrier_at(&kv_full, 0usize).init_manual(1);
    }
    // A launch for dV alone needs no values: 128 bytes keep the declaration valid.
    let mut v_smem = Shared::<[Pair]>::new_aligned_slice(comptime![usize::max(2 * v_tile, 32)], 1024usize);
    let mut q_ring = tile::ring(plan.stages, block, comptime![variant.key_width()]);
    let mut dout_ring = tile::ring(plan.stages, block, comptime![variant.value_width()]);
    let lse_delta_smem = Shared::<[f32]>::new_aligned_slice(comptime![plan.stages * plan.stats_len()], 128usize);
    let draw_len = comptime![if variant.dropout { plan.stages * plan.stats_len() } else { 32 }];
    let drop_smem = Shared::<[u32]>::new_aligned_slice(draw_len, 128usize);
    sync_async_proxy_shared();
    sync_cube();

    let blocks = QBlocks::new(
        first_key,
        &sequence.mask,
        comptime![block as u32],
        comptime![variant.causal],
        comptime![variant.window],
        comptime![plan.bounded()],
    );
    let q_loop = q_blocks::q_loop(&sequence, &blocks, kv_head, &sizes);
    let warpgroup = plane_broadcast(UNIT_POS / 128, 0u32);
    let mut stats = StatsRing { lse_delta: lse_delta_smem, dropout_keys: drop_smem };
    if UNIT_POS == 0 {
        let full = barrier_at(&kv_full, 0usize);
        full.arrive_and_expect_tx(1, comptime![(4 * 2 * (k_tile + v_tile)) as u32]);
        #[unroll]
        for wg in 0..2usize {
            let row = (sequence.first_key + first_key) as i32 + comptime![(wg * mma::ROWS) as i32];
            let tile = k_smem.slice_mut(comptime![wg * k_tile], comptime![(wg + 1) * k_tile]);
            tile::fetch(&kv_full, 0usize, tile, k, q_loop.batch, kv_head as i32, row, mma::ROWS, d);
            if comptime![plan.has_dk()] {
                let tile = v_smem.slice_mut(comptime![wg * v_tile], comptime![(wg + 1) * v_tile]);
                tile::fetch(&kv_full, 0usize, tile, v, q_loop.batch, kv_head as i32, row, mma::ROWS, v_dim);
            }
        }
        // Fill all stages but one; the loop keeps that distance.
        for step in 0..u32::min(q_loop.steps, comptime![plan.stages as u32 - 1]) {
            load(&mut q_ring, &mut dout_ring, &mut stats, q, dout, lse_delta, dropout_keys, &q_loop, step, plan);
        }
    }

    let lane = UNIT_POS % 32;
    let row = first_key + warpgroup * 64 + ((UNIT_POS / 32) % 4) * 16 + lane / 4;
    let own = warpgroup as usize * k_tile;
    let own_v = warpgroup as usize * v_tile;
    let key_layout = comptime![mma::k_major(mma::ROWS, variant.key_width())];
    let desc = Descriptors {
        k: mma::descriptor(k_smem.slice(own, own + k_tile), key_layout),
        v: mma::descriptor(
            v_smem.slice(own_v, own_v + v_tile),
            comptime![mma::k_major(mma::ROWS, variant.value_width())],
        ),
        q: mma::descriptor(q_ring.tiles.as_slice(), comptime![mma::k_major(block, variant.key_width())]),
        q_t: mma::descriptor(q_ring.tiles.as_slice(), comptime![mma::mn_major(variant.key_width(), block)]),
        dout: mma::descriptor(dout_ring.tiles.as_slice(), comptime![mma::k_major(block, variant.value_width())]),
        dout_t: mma::descriptor(dout_ring.tiles.as_slice(), comptime![mma::mn_major(variant.value_width(), block)]),
    };
    let mut state = DkDvState {
        acc_s: Array::new(comptime![block / 2]),
        acc_dp: Array::new(comptime![block / 2]),
        p: tile::operand_registers(block),
        ds: tile::operand_registers(block),
        acc_dk: Array::new(comptime![d / 2]),
        acc_dv: Array::new(comptime![v_dim / 2]),
    };
    if comptime![plan.has_dk()] {
        mma::fill(&mut state.acc_dk, 0.0, comptime![d / 2]);
    }
    if comptime![plan.has_dv()] {
        mma::fill(&mut state.acc_dv, 0.0, comptime![v_dim / 2]);
    }
    let scale_log2 = scale * LOG2_E;
    let visible = visible_queries(&sequence, row, (lane % 4) * 2, plan);
    let spread = dropout::spread(sizes.first_key + sequence.first_key + row);

    barrier_at(&kv_full, 0usize).wait_parity(0);
    // One loop over the q blocks of all heads: ptxas serialises warpgroup MMAs in a nested loop.
    let mut in_head = 0u32;
    let mut step = 0u32;
    loop {
        let block_start = (blocks.first + in_head) * comptime![block as u32];
        let mut masked = in_head < blocks.masked_start;
        if comptime![plan.bounded()] {
            masked = masked || in_head + blocks.masked_end >= q_loop.steps_per_head;
        }
        advance(
            &mut state,
            &mut q_ring,
            &mut dout_ring,
            &mut stats,
            &q_loop,
            &desc,
            q,
            dout,
            lse_delta,
            dropout_keys,
            step,
            scale_log2,
            masked,
            &visible,
            block_start as i32,
            spread,
            plan,
        );
        in_head = select(in_head + 1 == q_loop.steps_per_head, 0, in_head + 1);
        step += 1;
        if step == q_loop.steps {
            break;
        }
    }
    mma::wait(0usize);
    if comptime![plan.has_dk()] {
        mma::pin(&mut state.acc_dk);
    }
    if comptime![plan.has_dv()] {
        mma::pin(&mut state.acc_dv);
    }
    // The MMAs are done: the K and V tiles in shared memory are reused to stage dK and dV.
    let mut factor = Array::<f32>::new(2usize);
    let at_row = first_key + warpgroup * 64;
    let (from, rows) = (sequence.first_key, sequence.mask.keys);
    if comptime![plan.has_dv()] {
        if comptime![variant.dropout] {
            mma::fill(&mut factor, sizes.keep_scale, 2usize);
        } else {
            mma::fill(&mut factor, 1.0, 2usize);
        }
        if comptime![plan.has_dk()] {
            let tile = v_smem.slice_mut(own_v, own_v + v_tile);
            let head = kv_head as i32;
            tile::store(&state.acc_dv, &factor, tile, dv, &sequence, head, from, at_row, rows, v_dim, variant);
        } else {
            let tile = k_smem.slice_mut(own, own + k_tile);
            let head = kv_head as i32;
            tile::store(&state.acc_dv, &factor, tile, dv, &sequence, head, from, at_row, rows, v_dim, variant);
        }
    }
    if comptime![plan.has_dk()] {
        mma::fill(&mut factor, scale, 2usize);
        let tile = k_smem.slice_mut(own, own + k_tile);
        let head = kv_head as i32;
        tile::store(&state.acc_dk, &factor, tile, dk, &sequence, head, from, at_row, rows, d, variant);
    }
}
