//! The producer: which numbers a step of a tile reads.
use super::plan::{Fp8Plan, Scaling};
use super::scales::{ScaleRing, right_scales};
use crate::fp8::BLOCK;
use crate::grouped::kernel::{Sizes, tile};
use crate::grouped::operand_ring::OperandRing;
use crate::grouped::plan::Gemm;
use crate::grouped::tiles::{DEPTH, ROWS, Tile};
use crate::hopper::barrier::barrier_at;
use cubecl::prelude::*;
use half::bf16;

/// Loads the operands of all of the cube's tiles.
#[cube]
pub fn produce(
    ring: &mut OperandRing,
    scales: &mut ScaleRing,
    left: &TensorMap<bf16, Tiled>,
    right: &TensorMap<bf16, Tiled>,
    left_scales: &TensorMap<f32, Tiled>,
    right_scales: &TensorMap<f32, Tiled>,
    table: &[u32],
    sizes: &Sizes,
    #[comptime] plan: Fp8Plan,
) {
    let mut stage = 0u32;
    let mut parity = 0u32;
    let mut index = CUBE_POS_X;
    while index < sizes.tiles {
        let tile = tile(index, table, sizes, plan.base.gemm);
        for step in 0..tile.steps {
            load(ring, left, right, &tile, step, stage as usize, parity, plan);
            if comptime![plan.scaling == Scaling::Blocks] {
                load_scales(ring, scales, left_scales, right_scales, &tile, step, stage as usize, plan);
            }
            stage += 1;
            if stage == comptime![plan.base.stages as u32] {
                stage = 0u32;
                parity = parity ^ 1;
            }
        }
        index += CUBE_COUNT_X;
    }
}

/// Scales that a step loads.
fn scales(plan: Fp8Plan) -> usize {
    if plan.scaling == Scaling::Blocks { BLOCK + right_scales(plan) } else { 0 }
}

/// Starts the loads of a step's scales of blocks, for which [`load`] has told the barrier to wait.
#[cube]
fn load_scales(
    ring: &mut OperandRing,
    to: &mut ScaleRing,
    left: &TensorMap<f32, Tiled>,
    right: &TensorMap<f32, Tiled>,
    tile: &Tile,
    step: u32,
    stage: usize,
    #[comptime] plan: Fp8Plan,
) {
    let full = barrier_at(&ring.full, stage);
    let row = tile.row * comptime![ROWS as u32];
    let first = tile.first / comptime![ROWS as u32];
    let mut line = step;
    let mut right_line = first + tile.column;
    let mut right_at = step / 4 * 4;
    if comptime![plan.base.gemm == Gemm::WeightGradient] {
        line = first + step;
        right_line = line;
        right_at = tile.column * comptime![plan.base.width as u32];
    }
    let from = stage * BLOCK;
    full.tma_load_2d(left, to.left.slice_mut(from, from + BLOCK), line as i32, row as i32);
    let from = stage * comptime![BLOCK / 2];
    let target = to.right.slice_mut(from, from + comptime![right_scales(plan) / 2]);
    full.tma_load_2d(right, target, right_line as i32, right_at as i32);
}

/// As [`operand_ring::load`](crate::grouped::operand_ring::load), with both operands K-major.
#[cube]
fn load(
    to: &mut OperandRing,
    left: &TensorMap<bf16, Tiled>,
    right: &TensorMap<bf16, Tiled>,
    tile: &Tile,
    step: u32,
    stage: usize,
    parity: u32,
    #[comptime] plan: Fp8Plan,
) {
    let (left_tile, right_tile) = comptime![(plan.base.left_tile(), plan.base.right_tile())];
    barrier_at(&to.free, stage).wait_parity(parity ^ 1);
    let full = barrier_at(&to.full, stage);
    full.arrive_and_expect_tx(1, comptime![(4 * (left_tile + right_tile + scales(plan))) as u32]);
    let row = tile.row * comptime![ROWS as u32];
    let mut line = tile.column * comptime![plan.base.width as u32];
    // In pairs of numbers.
    let mut inner = step * comptime![DEPTH as u32];
    if comptime![plan.base.gemm == Gemm::WeightGradient] {
        inner += tile.first / 2;
    } else {
        line += tile.first;
    }
    let from = stage * left_tile;
    full.tma_load_2d(left, to.left.slice_mut(from, from + left_tile), row as i32, inner as i32);
    let from = stage * right_tile;
    full.tma_load_2d(right, to.right.slice_mut(from, from + right_tile), line as i32, inner as i32);
}
