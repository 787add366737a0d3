//! The kernel: a producer and two consumers as in [`grouped`](crate::grouped::kernel::grouped), with scales.
use super::load::produce;
use super::plan::{Fp8Plan, Scaling, Sums};
use super::scales::{self, ScaleRing};
use crate::grouped::epilogue;
use crate::grouped::kernel::{Sizes, release, tile};
use crate::grouped::operand_ring::{self, CONSUMER_PLANES, OperandRing};
use crate::grouped::plan::Gemm;
use crate::grouped::tiles::{DEPTH, ROWS};
use crate::hopper::barrier::barrier_at;
use crate::hopper::mma::{self, STEP};
use cubecl::prelude::*;
use half::bf16;

/// `plan.base.gemm` of all groups, as [`grouped`](crate::grouped::kernel::grouped). `left_scales` and `right_scales` are what
/// sums are multiplied by if groups and matrices have scales, [`APART`](super::APART) numbers from one to the next, and
/// `groups` has the group of every 128 rows. Those of blocks are `left_blocks` and `right_blocks`, in the order of
/// [`Granularity::scales`](crate::fp8::Granularity::scales).
#[cube(launch_unchecked)]
pub fn grouped_fp8<O: Float>(
    left: &TensorMap<bf16, Tiled>,
    right: &TensorMap<bf16, Tiled>,
    left_blocks: &TensorMap<f32, Tiled>,
    right_blocks: &TensorMap<f32, Tiled>,
    out: &mut TensorMap<O, Tiled>,
    table: &[u32],
    groups: &[u32],
    left_scales: &[f32],
    right_scales: &[f32],
    sizes: Sizes,
    #[comptime] plan: Fp8Plan,
) {
    let mut ring = operand_ring::operand_ring(plan.base);
    let mut scales = scales::scale_ring(plan);
    let mut staging = epilogue::staging(plan.base);
    sync_async_proxy_shared();
    sync_cube();
    let plane = plane_broadcast(UNIT_POS / 32, 0u32);
    if plane == CONSUMER_PLANES {
        if UNIT_POS % 32 == 0 {
            produce(&mut ring, &mut scales, left, right, left_blocks, right_blocks, table, &sizes, plan);
        }
    } else {
        let (left, right) = (left_scales, right_scales);
        consume(&mut ring, &scales, &mut staging, out, table, groups, left, right, &sizes, plane, plan);
    }
}

/// The consumers: compute the cube's tiles, 64 rows per warpgroup.
#[cube]
fn consume<O: Float>(
    ring: &mut OperandRing,
    blocks: &ScaleRing,
    staging: &mut Shared<[u32]>,
    out: &mut TensorMap<O, Tiled>,
    table: &[u32],
    groups: &[u32],
    left_scales: &[f32],
    right_scales: &[f32],
    sizes: &Sizes,
    plane: u32,
    #[comptime] plan: Fp8Plan,
) {
    let len = comptime![plan.base.width / 2];
    let left_layout = comptime![mma::k_major(ROWS, DEPTH)];
    let right_layout = comptime![mma::k_major(plan.base.width, DEPTH)];
    let half = comptime![mma::advance(left_layout, mma::ROWS, 0)];
    let left = mma::descriptor(ring.left.as_slice(), left_layout) + (plane / 4) as u64 * half;
    let right = mma::descriptor(ring.right.as_slice(), right_layout);
    let mut sum = Array::<f32>::new(len);
    let mut total = Array::<f32>::new(comptime![plan.totals()]);
    let mut factors = scales::step_scales(plan);
    let mut stage = 0u32;
    let mut parity = 0u32;
    let mut index = CUBE_POS_X;
    loop {
        let tile = tile(index, table, sizes, plan.base.gemm);
        mma::fill(&mut sum, 0.0, len);
        if comptime![plan.sums == Sums::Exact] {
            mma::fill(&mut total, 0.0, len);
        }
        let mut next = 0.0f32;
        if comptime![plan.scaling == Scaling::Groups] {
            next = scales::of_groups(&tile, 0u32, groups, left_scales, right_scales, sizes, plan);
            scales::set(&mut factors, next);
        }
        let mut before = 0u32;
        let mut step = 0u32;
        loop {
            barrier_at(&ring.full, stage as usize).wait_parity(parity);
            let left = left + stage as u64 * comptime![(plan.base.left_tile() * 4 / 16) as u64];
            let right = right + stage as u64 * comptime![(plan.base.right_tile() * 4 / 16) as u64];
            mma::pin(&mut sum);
            mma::fence();
            #[unroll]
            for s in 0..comptime![DEPTH / STEP] {
                let left = left + comptime![mma::advance(left_layout, 0, s * STEP)];
                let right = right + comptime![mma::advance(right_layout, 0, s * STEP)];
                mma::mma_fp8(&mut sum, left, right, plan.base.width, plan.formats[0], plan.formats[1]);
            }
            mma::commit();
            if comptime![plan.sums == Sums::Exact] {
                if comptime![plan.scaling == Scaling::Blocks] {
                    scales::read(&mut factors, blocks, step, stage, plane, plan);
                } else if comptime![plan.base.gemm == Gemm::WeightGradient] {
                    // A step ahead: memory is further away than a step takes.
                    scales::set(&mut factors, next);
                    let step = min(step + 1, tile.steps - 1);
                    next = scales::of_groups(&tile, step, groups, left_scales, right_scales, sizes, plan);
                }
                mma::wait(0usize);
                mma::pin(&mut sum);
                release(ring, stage);
                scales::promote(&mut total, &mut sum, &factors, plan);
            } else {
                mma::wait(1usize);
                if step > 0 {
                    release(ring, before);
                }
                before = stage;
            }
            stage += 1;
            if stage == comptime![plan.base.stages as u32] {
                stage = 0u32;
                parity = parity ^ 1;
            }
            step += 1;
            if step == tile.steps {
                break;
            }
        }
        if comptime![plan.sums == Sums::Exact] {
            epilogue::store(&total, staging, out, &tile, plane, plan.base);
        } else {
            mma::wait(0usize);
            mma::pin(&mut sum);
            release(ring, before);
            #[unroll]
            for i in 0..len {
                sum[i] = sum[i] * next;
            }
            epilogue::store(&sum, staging, out, &tile, plane, plan.base);
        }
        index += CUBE_COUNT_X;
        if index >= sizes.tiles {
            break;
        }
    }
    epilogue::drain();
}
