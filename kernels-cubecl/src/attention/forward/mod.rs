//! The forward kernel: two warpgroups of 64 queries each, as in FlashAttention-3; one of their units also issues the
//! TMA loads.
//!
//! There is no producer warpgroup: it would leave each unit 168 registers. CubeCL has the driver link its kernels, and
//! ptxas ignores `setmaxnreg` in that mode, so the consumers could not take over its registers.
mod plan;
mod step;

pub use plan::ForwardPlan;

use super::kv_blocks::{self, FragmentPosition, LoopInvariants};
use super::masks::{BitRows, row_masks};
use super::tile::{self, MASKED};
use super::variant::{Sizes, cube_sequence};
use crate::hopper::barrier::barrier_at;
use crate::hopper::mma::{self, Pair};
use crate::hopper::ptx;
use cubecl::prelude::*;
use half::bf16;
use step::{Descriptors, PING_PONG_0, SoftmaxState, advance, softmax};

const LN_2: f32 = core::f32::consts::LN_2;

/// `out = softmax(q kᵀ · scale) v` for 128 queries of one head; `lse` gets the natural logarithm of the sum of
/// exponentials. 256 units; cube `(head, sequence, q block)`; tensor maps of `maps` with boxes of 64 rows
/// (`q`), `block` rows (`k`, `v`), and those for stores (`out`). A query without a visible key gets zeros and minus
/// infinity.
#[cube(launch_unchecked)]
pub fn attention_forward(
    q: &TensorMap<bf16, Tiled>,
    k: &TensorMap<bf16, Tiled>,
    v: &TensorMap<bf16, Tiled>,
    out: &mut TensorMap<bf16, Tiled>,
    lse: &mut [f32],
    dropout_keys: &[u32],
    hidden: &[u32],
    kept: &[u32],
    query_starts: &[i32],
    key_starts: &[i32],
    hidden_rows: BitRows,
    kept_rows: BitRows,
    sizes: Sizes,
    scale_log2: f32,
    #[comptime] plan: ForwardPlan,
) {
    let variant = comptime![plan.variant];
    let d = comptime![variant.head_dim];
    let block = comptime![plan.block];
    let q_tile = comptime![mma::ROWS * variant.key_width() / 2];

    let head = CUBE_POS_X;
    let sequence = cube_sequence(query_starts, key_starts, &sizes, variant.packed);
    kv_blocks::exit_past_end(&sequence, variant);

    let mut q_smem = Shared::<[Pair]>::new_aligned_slice(comptime![2 * q_tile], 1024usize);
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
        full.arrive_and_expect_tx(1, comptime![(4 * 2 * q_tile) as u32]);
        #[unroll]
        for wg in 0..2usize {
            let row = (sequence.first_query + first_row) as i32 + comptime![(wg * mma::ROWS) as i32];
            let tile = q_smem.slice_mut(comptime![wg * q_tile], comptime![(wg + 1) * q_tile]);
            tile::fetch(&q_full, 0usize, tile, q, kv_loop.batch, head as i32, row, mma::ROWS, d);
        }
        kv_blocks::load(&mut k_ring, k, &kv_loop, 0u32, d, block, plan.stages);
        kv_blocks::load(&mut v_ring, v, &kv_loop, 0u32, variant.value_dim, block, plan.stages);
        if count > 1 {
            kv_blocks::load(&mut k_ring, k, &kv_loop, 1u32, d, block, plan.stages);
        }
    }

    let lane = UNIT_POS % 32;
    let row = first_row + warpgroup * 64 + ((UNIT_POS / 32) % 4) * 16 + lane / 4;
    let fragment = FragmentPosition { warpgroup, row, column: (lane % 4) * 2 };
    let own = warpgroup as usize * q_tile;
    let desc = Descriptors {
        q: mma::descriptor(q_smem.slice(own, own + q_tile), comptime![mma::k_major(mma::ROWS, variant.key_width())]),
        k: mma::descriptor(k_ring.tiles.as_slice(), comptime![mma::k_major(block, variant.key_width())]),
        v: mma::descriptor(v_ring.tiles.as_slice(), comptime![mma::mn_major(variant.value_width(), block)]),
    };

    let statistics = (sequence.batch as u32 * CUBE_COUNT_X + head) * sizes.stats_stride + sequence.first_query;
    let mut state = SoftmaxState {
        acc_s: Array::new(comptime![block / 2]),
        acc_o: Array::new(comptime![variant.value_dim / 2]),
        p: tile::operand_registers(block),
        row_max: Array::new(2usize),
        row_sum: Array::new(2usize),
        o_scale: Array::new(2usize),
        dropout_keys: tile::row_dropout_keys(
            dropout_keys,
            statistics,
            row,
            sequence.mask.queries,
            sizes.stats_len,
            variant.dropout,
        ),
        hidden: row_masks(&hidden_rows, sequence.batch as u32, head, row),
        kept: row_masks(&kept_rows, sequence.batch as u32, head, row),
    };
    mma::fill(&mut state.acc_o, 0.0, comptime![variant.value_dim / 2]);
    mma::fill(&mut state.row_max, MASKED, 2usize);
    mma::fill(&mut state.row_sum, 0.0, 2usize);

    // The first kv block: there is no previous P V that could overlap with its softmax.
    let first = tile::slot(0u32, plan.stages);
    barrier_at(&q_full, 0usize).wait_parity(0);
    tile::wait_full(&mut k_ring, &first);
    tile::issue_gemm_ss(&mut state.acc_s, desc.q, desc.k, block, d, variant.element);
    mma::wait(0usize);
    mma::pin(&mut state.acc_s);
    tile::release(&mut k_ring, &first);
    let last = (blocks.end - 1) * comptime![block as u32];
    tile::apply_mask(&mut state.acc_s, row, last + fragment.column, &sequence.mask, block, variant);
    softmax(&mut state, &kv_loop, hidden, kept, last + fragment.column, scale_log2, plan);
    tile::pack_operand(&mut state.p, &state.acc_s, block, false, variant.element);

    let invariants = LoopInvariants::<Descriptors> { fragment, sequence, kv_loop, desc, scale_log2 };
    if comptime![plan.ping_pong] {
        if warpgroup == 1 {
            ptx::named_barrier_arrive(PING_PONG_0, 256u32);
        }
    }
    if comptime![variant.window] {
        for step in 1..count {
            let masked = step < blocks.masked_end || step + blocks.masked_start >= count;
            advance(&mut state, &mut k_ring, &mut v_ring, &invariants, k, v, hidden, kept, step, masked, plan);
        }
    } else {
        for step in 1..blocks.masked_end {
            advance(&mut state, &mut k_ring, &mut v_ring, &invariants, k, v, hidden, kept, step, true, plan);
        }
        for step in u32::max(1, blocks.masked_end)..count {
            advance(&mut state, &mut k_ring, &mut v_ring, &invariants, k, v, hidden, kept, step, false, plan);
        }
    }
    let slot = tile::slot(count - 1, plan.stages);
    tile::wait_full(&mut v_ring, &slot);
    let v_tile = invariants.desc.v + tile::offset(&slot, block, comptime![variant.value_width()]);
    tile::issue_gemm_rs(&mut state.acc_o, &mut state.p, v_tile, block, variant.value_dim, variant.element);
    // Consumes the last signal of the second warpgroup, so that the barrier ends balanced.
    if comptime![plan.ping_pong] {
        if warpgroup == 0 {
            ptx::named_barrier_sync(PING_PONG_0, 256u32);
        }
    }

    // Each row's sum is spread over four lanes.
    #[unroll]
    for half in 0..2usize {
        let sum = state.row_sum[half] + plane_shuffle_xor(state.row_sum[half], 1u32);
        let sum = sum + plane_shuffle_xor(sum, 2u32);
        let mut inverse = select(sum > 0.0, ptx::reciprocal(sum), 0.0);
        if comptime![variant.dropout || variant.kept] {
            inverse = inverse * sizes.keep_scale;
        }
        state.o_scale[half] = inverse;
        let at = row + comptime![(half * 8) as u32];
        // Past the last query are the next sequence's statistics if packed, otherwise padding.
        let end = if comptime![variant.packed] { invariants.sequence.mask.queries } else { sizes.stats_stride };
        if lane % 4 == 0 && at < end {
            // Without a visible key: the logarithm of zero.
            let value = (state.row_max[half] * scale_log2 + ptx::log2(sum)) * LN_2;
            lse[(statistics + at) as usize] = value;
        }
    }
    mma::wait(0usize);
    mma::pin(&mut state.acc_o);
    // The MMAs are done: the Q tile in shared memory is reused to stage the output.
    let tile = q_smem.slice_mut(own, own + q_tile);
    tile::store(
        &state.acc_o,
        &state.o_scale,
        tile,
        out,
        &invariants.sequence,
        head as i32,
        invariants.sequence.first_query,
        first_row + warpgroup * 64,
        invariants.sequence.mask.queries,
        variant.value_dim,
        variant,
    );
}
