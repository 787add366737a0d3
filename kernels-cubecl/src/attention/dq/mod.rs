//! dQ: like the forward kernel, a cube has 128 queries and loops over the kv blocks that they see.
mod plan;
mod step;

pub use plan::DqPlan;

use super::kv_blocks::{self, FragmentPosition, LoopInvariants};
use super::tile;
use super::variant::{Sizes, cube_sequence};
use crate::hopper::barrier::barrier_at;
use crate::hopper::mma::{self, Pair};
use cubecl::prelude::*;
use half::bf16;
use step::{Descriptors, DqState, advance};

const LOG2_E: f32 = core::f32::consts::LOG2_E;

/// `dq = scale · dS k` with `dS = P ∘ (dout vᵀ - delta)` and `P = exp(q kᵀ · scale - lse)`; with dropout, `dout vᵀ` is
/// multiplied by 0 or `keep_scale`. 256 units; cube `(head, sequence, q block)`; tensor maps with boxes of 64 rows
/// (`q`, `dout`), `block` rows (`k`, `v`) and those for stores (`dq`). `lse_delta` is the output of [`super::delta`].
#[cube(launch_unchecked)]
pub fn attention_dq(
    q: &TensorMap<bf16, Tiled>,
    k: &TensorMap<bf16, Tiled>,
    v: &TensorMap<bf16, Tiled>,
    dout: &TensorMap<bf16, Tiled>,
    lse_delta: &[f32],
    dropout_keys: &[u32],
    query_starts: &[i32],
    key_starts: &[i32],
    dq: &mut TensorMap<bf16, Tiled>,
    sizes: Sizes,
    scale: f32,
    #[comptime] plan: DqPlan,
) {
    let variant = comptime![plan.variant];
    let (d, v_dim) = (variant.head_dim, variant.value_dim);
    let block = comptime![plan.block];
    let q_tile = comptime![mma::ROWS * variant.key_width() / 2];
    let dout_tile = comptime![mma::ROWS * variant.value_width() / 2];

    let head = CUBE_POS_X;
    let sequence = cube_sequence(query_starts, key_starts, &sizes, variant.packed);
    kv_blocks::exit_past_end(&sequence, variant);

    let mut q_smem = Shared::<[Pair]>::new_aligned_slice(comptime![2 * q_tile], 1024usize);
    let mut dout_smem = Shared::<[Pair]>::new_aligned_slice(comptime![2 * dout_tile], 1024usize);
    let q_full = Shared::<[u64]>::new_slice(1usize);
    if UNIT_POS == 0 {
        barrier_at(&q_full, 0usize).init_manual(1);
    }
    let mut k_ring = tile::ring(plan.stages, block, comptime![variant.key_width()]);
    let mut v_ring = tile::ring(plan.stages, block, comptime![variant.value_width()]);
    sync_async_proxy_shared();
    sync_cube();

    let first_row = kv_blocks::first_row(&sequence, variant);
    let blocks = kv_blocks::visible_blocks(first_row, &sequence, block, variant);
    let kv_loop = kv_blocks::kv_loop(&sequence, &blocks, head, &sizes);
    let count = kv_loop.count;
    let warpgroup = plane_broadcast(UNIT_POS / 128, 0u32);
    if UNIT_POS == 0 {
        let full = barrier_at(&q_full, 0usize);
        full.arrive_and_expect_tx(1, comptime![(4 * 2 * (q_tile + dout_tile)) as u32]);
        #[unroll]
        for wg in 0..2usize {
            let row = (sequence.first_query + first_row) as i32 + comptime![(wg * mma::ROWS) as i32];
            let tile = q_smem.slice_mut(comptime![wg * q_tile], comptime![(wg + 1) * q_tile]);
            tile::fetch(&q_full, 0usize, tile, q, kv_loop.batch, head as i32, row, mma::ROWS, d);
            let tile = dout_smem.slice_mut(comptime![wg * dout_tile], comptime![(wg + 1) * dout_tile]);
            tile::fetch(&q_full, 0usize, tile, dout, kv_loop.batch, head as i32, row, mma::ROWS, v_dim);
        }
        // Fill all stages but one; the loop keeps that distance.
        for step in 0..u32::min(count, comptime![plan.stages as u32 - 1]) {
            kv_blocks::load(&mut k_ring, k, &kv_loop, step, d, block, plan.stages);
            kv_blocks::load(&mut v_ring, v, &kv_loop, step, v_dim, block, plan.stages);
        }
    }

    let lane = UNIT_POS % 32;
    let row = first_row + warpgroup * 64 + ((UNIT_POS / 32) % 4) * 16 + lane / 4;
    let own = warpgroup as usize * q_tile;
    let own_dout = warpgroup as usize * dout_tile;
    let desc = Descriptors {
        q: mma::descriptor(q_smem.slice(own, own + q_tile), comptime![mma::k_major(mma::ROWS, variant.key_width())]),
        dout: mma::descriptor(
            dout_smem.slice(own_dout, own_dout + dout_tile),
            comptime![mma::k_major(mma::ROWS, variant.value_width())],
        ),
        k: mma::descriptor(k_ring.tiles.as_slice(), comptime![mma::k_major(block, variant.key_width())]),
        k_t: mma::descriptor(k_ring.tiles.as_slice(), comptime![mma::mn_major(variant.key_width(), block)]),
        v: mma::descriptor(v_ring.tiles.as_slice(), comptime![mma::k_major(block, variant.value_width())]),
    };
    let statistics = (sequence.batch as u32 * CUBE_COUNT_X + head) * sizes.stats_stride + sequence.first_query;
    let mut state = DqState {
        acc_s: Array::new(comptime![block / 2]),
        acc_dp: Array::new(comptime![block / 2]),
        ds: tile::operand_registers(block),
        acc_dq: Array::new(comptime![d / 2]),
        neg_lse: Array::new(2usize),
        delta: Array::new(2usize),
        dropout_keys: tile::row_dropout_keys(
            dropout_keys,
            statistics,
            row,
            sequence.mask.queries,
            sizes.stats_len,
            variant.dropout,
        ),
    };
    mma::fill(&mut state.acc_dq, 0.0, comptime![d / 2]);
    #[unroll]
    for half in 0..2usize {
        let mut at = row + comptime![(half * 8) as u32];
        if comptime![variant.packed] {
            at = u32::min(at, sequence.mask.queries - 1);
        }
        state.neg_lse[half] = lse_delta[(statistics + at) as usize];
        state.delta[half] = lse_delta[(sizes.stats_len + statistics + at) as usize];
    }
    let scale_log2 = scale * LOG2_E;
    let fragment = FragmentPosition { warpgroup, row, column: (lane % 4) * 2 };
    let invariants = LoopInvariants::<Descriptors> { fragment, sequence, kv_loop, desc, scale_log2 };

    barrier_at(&q_full, 0usize).wait_parity(0);
    // Two copies of the step, one of them without masking, save some of its time. Above head_dim 128 there are no
    // registers for that.
    if comptime![variant.window || d > 128] {
        let mut step = 0u32;
        loop {
            let masked = step < blocks.masked_end || step + blocks.masked_start >= count;
            advance(&mut state, &mut k_ring, &mut v_ring, &invariants, k, v, step, masked, plan);
            step += 1;
            if step == count {
                break;
            }
        }
    } else {
        for step in 0..blocks.masked_end {
            advance(&mut state, &mut k_ring, &mut v_ring, &invariants, k, v, step, true, plan);
        }
        for step in blocks.masked_end..count {
            advance(&mut state, &mut k_ring, &mut v_ring, &invariants, k, v, step, false, plan);
        }
    }
    mma::wait(0usize);
    mma::pin(&mut state.acc_dq);
    mma::fill(&mut state.neg_lse, scale, 2usize);
    // The MMAs are done: the Q tile in shared memory is reused to stage dQ.
    let tile = q_smem.slice_mut(own, own + q_tile);
    tile::store(
        &state.acc_dq,
        &state.neg_lse,
        tile,
        dq,
        &invariants.sequence,
        head as i32,
        invariants.sequence.first_query,
        first_row + warpgroup * 64,
        invariants.sequence.mask.queries,
        d,
        variant,
    );
}
