//! The fused backward kernel: dQ, dK and dV in one pass over the scores. Five GEMMs; the two separate kernels need
//! seven.
//!
//! Like [`dkdv`](super::dkdv), a cube has 128 keys of one key head. The dQ of a query gets contributions from many
//! cubes, which add them in memory in no fixed order: two calls differ in the last bits.
mod buffers;
mod ds;
mod mask;
mod plan;
mod step;

pub use plan::{DqDkDvPlan, block};

use super::dq_accum::{self, DQ_HALF, reduce_dq, sync_warpgroup};
use super::masks::BitRows;
use super::q_blocks;
use super::tile;
use super::variant::{Sizes, cube_sequence};
use crate::hopper::barrier::barrier_at;
use crate::hopper::bulk::{self, Quad};
use crate::hopper::mma::{self, Pair};
use crate::tiling::{CUBE_KEYS, QBlocks};
use buffers::SharedBuffers;
use cubecl::prelude::*;
use ds::{ds_offset, issue_dq, wait_for_ds};
use half::bf16;
use mask::visible_queries;
use plan::DS_STAGES;
use step::{Descriptors, DqDkDvState, advance, load};

const LOG2_E: f32 = core::f32::consts::LOG2_E;

/// dK and dV as [`dkdv`](super::dkdv) writes them; dQ, not yet scaled, is added to `dq_accum` in the order that
/// [`convert_dq`](super::dq_accum::convert_dq()) reads. 256 units; cube `(key head, sequence, kv block)`; tensor maps
/// with boxes of 64 rows, those for stores (`dk`, `dv`), and a q block's columns of both kinds of `lse_delta`.
#[cube(launch_unchecked)]
pub fn attention_dqdkdv(
    q: &TensorMap<bf16, Tiled>,
    k: &TensorMap<bf16, Tiled>,
    v: &TensorMap<bf16, Tiled>,
    dout: &TensorMap<bf16, Tiled>,
    lse_delta: &TensorMap<f32, Tiled>,
    hidden: &[u32],
    kept: &[u32],
    query_starts: &[i32],
    key_starts: &[i32],
    dq_accum: &mut [Quad],
    dk: &mut TensorMap<bf16, Tiled>,
    dv: &mut TensorMap<bf16, Tiled>,
    hidden_rows: BitRows,
    kept_rows: BitRows,
    sizes: Sizes,
    scale: f32,
    #[comptime] plan: DqDkDvPlan,
) {
    let variant = comptime![plan.variant];
    let (block, head_dim, k_tile) = comptime![(plan.block(), plan.head_dim(), plan.k_tile())];
    let kv_head = CUBE_POS_X;
    let sequence = cube_sequence(query_starts, key_starts, &sizes, variant.packed);
    // With a causal mask the first keys are seen by the most queries: they start first, for all heads. Head by head the
    // L2 cache would hold the accumulator, but the longest cubes of the last head would run alone at the end.
    let first_key = CUBE_POS_Z * comptime![CUBE_KEYS as u32];
    if comptime![variant.packed] {
        // The grid is sized for the longest sequence.
        if first_key >= sequence.mask.keys {
            terminate!();
        }
    }

    let mut k_smem = Shared::<[Pair]>::new_aligned_slice(comptime![2 * k_tile], 1024usize);
    let mut v_smem = Shared::<[Pair]>::new_aligned_slice(comptime![2 * k_tile], 1024usize);
    let ds_smem = Shared::<[Pair]>::new_aligned_slice(comptime![DS_STAGES * 2 * plan.ds_tile()], 1024usize);
    let dq_stage = Shared::<[Quad]>::new_aligned_slice(comptime![2 * DQ_HALF as usize], 128usize);
    let ds_full = Shared::<[u64]>::new_slice(DS_STAGES);
    let kv_full = Shared::<[u64]>::new_slice(1usize);
    if UNIT_POS == 0 {
        barrier_at(&kv_full, 0usize).init_manual(1);
        #[unroll]
        for stage in 0..DS_STAGES {
            barrier_at(&ds_full, stage).init_manual(8);
        }
    }
    let lse_delta_smem = Shared::<[f32]>::new_aligned_slice(comptime![plan.stages * plan.stats_len()], 128usize);
    let mut q_ring = tile::ring(plan.stages, block, head_dim);
    let mut dout_ring = tile::ring(plan.stages, block, head_dim);
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
    let mut shared = SharedBuffers { lse_delta: lse_delta_smem, ds: ds_smem, ds_full, dq_stage };
    if UNIT_POS == 0 {
        let full = barrier_at(&kv_full, 0usize);
        full.arrive_and_expect_tx(1, comptime![(4 * 4 * k_tile) as u32]);
        #[unroll]
        for wg in 0..2usize {
            let row = (sequence.first_key + first_key) as i32 + comptime![(wg * mma::ROWS) as i32];
            let (from, to) = comptime![(wg * k_tile, (wg + 1) * k_tile)];
            let head = kv_head as i32;
            tile::fetch(&kv_full, 0usize, k_smem.slice_mut(from, to), k, q_loop.batch, head, row, mma::ROWS, head_dim);
            tile::fetch(&kv_full, 0usize, v_smem.slice_mut(from, to), v, q_loop.batch, head, row, mma::ROWS, head_dim);
        }
        // Fill all stages but one; the loop keeps that distance.
        for step in 0..u32::min(q_loop.steps, comptime![plan.stages as u32 - 1]) {
            load(&mut q_ring, &mut dout_ring, &mut shared, q, dout, lse_delta, &q_loop, step, plan);
        }
    }

    let lane = UNIT_POS % 32;
    let row = first_key + warpgroup * 64 + ((UNIT_POS / 32) % 4) * 16 + lane / 4;
    let own = warpgroup as usize * k_tile;
    let columns = comptime![mma::mn_major(head_dim, mma::ROWS)];
    let keys = comptime![mma::k_major(mma::ROWS, block)];
    let desc = Descriptors {
        k: mma::descriptor(k_smem.slice(own, own + k_tile), comptime![mma::k_major(mma::ROWS, head_dim)]),
        k_t: mma::descriptor(k_smem.as_slice(), columns)
            + warpgroup as u64 * comptime![mma::advance(columns, head_dim - mma::ROWS, 0)],
        v: mma::descriptor(v_smem.slice(own, own + k_tile), comptime![mma::k_major(mma::ROWS, head_dim)]),
        q: mma::descriptor(q_ring.tiles.as_slice(), comptime![mma::k_major(block, head_dim)]),
        q_t: mma::descriptor(q_ring.tiles.as_slice(), comptime![mma::mn_major(head_dim, block)]),
        dout: mma::descriptor(dout_ring.tiles.as_slice(), comptime![mma::k_major(block, head_dim)]),
        dout_t: mma::descriptor(dout_ring.tiles.as_slice(), comptime![mma::mn_major(head_dim, block)]),
        ds_t: mma::descriptor(shared.ds.as_slice(), comptime![mma::mn_major(block, mma::ROWS)])
            + warpgroup as u64 * comptime![mma::advance(keys, 0, block - mma::ROWS)],
    };
    let mut state = DqDkDvState {
        acc_s: Array::new(comptime![block / 2]),
        acc_dp: Array::new(comptime![block / 2]),
        p: tile::operand_registers(block),
        ds: tile::operand_registers(block),
        acc_dq: Array::new(comptime![mma::ROWS / 2]),
        acc_dk: Array::new(comptime![head_dim / 2]),
        acc_dv: Array::new(comptime![head_dim / 2]),
    };
    mma::fill(&mut state.acc_dk, 0.0, comptime![head_dim / 2]);
    mma::fill(&mut state.acc_dv, 0.0, comptime![head_dim / 2]);
    let scale_log2 = scale * LOG2_E;
    let visible = visible_queries(&sequence, row, (lane % 4) * 2, plan);
    // Where this unit's part of the first q block lies in the accumulator. The blocks of a head are adjacent; between
    // two heads `target` jumps over the blocks that see none of the keys.
    let mut blocks_of_head = sizes.stats_stride / comptime![block as u32];
    let mut head_before = (CUBE_POS_Y * CUBE_COUNT_X + kv_head) * sizes.group;
    let mut first_block = blocks.first;
    if comptime![variant.packed] {
        blocks_of_head += CUBE_COUNT_Y;
        head_before = kv_head * sizes.group;
        first_block += dq_accum::first_block(sequence.first_query, CUBE_POS_Y, block);
    }
    let jump = (blocks_of_head + 1 - q_loop.steps_per_head) * comptime![2 * DQ_HALF];
    let first_block = head_before * blocks_of_head + first_block;
    // `target` lags the loop by two steps.
    let mut target =
        first_block * comptime![2 * DQ_HALF] + warpgroup * DQ_HALF + UNIT_POS % 128 - jump - comptime![2 * DQ_HALF];

    barrier_at(&kv_full, 0usize).wait_parity(0);
    // One loop over the q blocks of all heads: ptxas serialises warpgroup MMAs in a nested loop.
    let mut in_head = 0u32;
    let mut before = 1u32;
    let mut step = 0u32;
    loop {
        let block_start = (blocks.first + in_head) * comptime![block as u32];
        let mut masked = in_head < blocks.masked_start;
        if comptime![plan.bounded()] {
            masked = masked || in_head + blocks.masked_end >= q_loop.steps_per_head;
        }
        if comptime![variant.packed && !variant.causal] {
            masked = masked || first_key + comptime![CUBE_KEYS as u32] > sequence.mask.keys;
        }
        advance(
            &mut state,
            &mut q_ring,
            &mut dout_ring,
            &mut shared,
            &q_loop,
            &desc,
            q,
            dout,
            lse_delta,
            dq_accum,
            hidden,
            kept,
            &hidden_rows,
            &kept_rows,
            row,
            target,
            step,
            scale_log2,
            masked,
            &visible,
            block_start as i32,
            plan,
        );
        target += select(before == 0, jump, comptime![2 * DQ_HALF]);
        before = in_head;
        in_head = select(in_head + 1 == q_loop.steps_per_head, 0, in_head + 1);
        step += 1;
        if step == q_loop.steps {
            break;
        }
    }
    mma::wait(0usize);
    mma::pin(&mut state.acc_dq);
    mma::pin(&mut state.acc_dk);
    mma::pin(&mut state.acc_dv);
    if step > 1 {
        reduce_dq(dq_accum, target, &mut shared.dq_stage, &state.acc_dq);
    }
    target += select(before == 0, jump, comptime![2 * DQ_HALF]);
    wait_for_ds(&mut shared, step - 1);
    issue_dq(&mut state.acc_dq, desc.ds_t + ds_offset(step - 1, plan), desc.k_t, plan);
    mma::wait(0usize);
    mma::pin(&mut state.acc_dq);
    if UNIT_POS % 128 == 0 {
        bulk::wait_for_reads();
    }
    sync_warpgroup();
    reduce_dq(dq_accum, target, &mut shared.dq_stage, &state.acc_dq);
    if UNIT_POS % 128 == 0 {
        bulk::wait_for_reads();
    }
    // All planes have read K before dK and dV are staged in its place.
    sync_cube();
    let mut factor = Array::<f32>::new(2usize);
    let at_row = first_key + warpgroup * 64;
    mma::fill(&mut factor, if comptime![variant.kept] { sizes.keep_scale } else { 1.0f32.runtime() }, 2usize);
    let tile = v_smem.slice_mut(own, own + k_tile);
    let (head, from, rows) = (kv_head as i32, sequence.first_key, sequence.mask.keys);
    tile::store(&state.acc_dv, &factor, tile, dv, &sequence, head, from, at_row, rows, head_dim, variant);
    mma::fill(&mut factor, scale, 2usize);
    let tile = k_smem.slice_mut(own, own + k_tile);
    tile::store(&state.acc_dk, &factor, tile, dk, &sequence, head, from, at_row, rows, head_dim, variant);
}
