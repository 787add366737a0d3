//! The ring of operand tiles in shared memory, which TMA fills.
use super::plan::{Gemm, GroupedPlan};
use super::tiles::{DEPTH, ROWS, Tile};
use crate::hopper::barrier::barrier_at;
use crate::hopper::mma::{self, PANEL, Pair};
use cubecl::prelude::*;
use cubecl::wgmma::WgmmaTileLayout;
use half::bf16;

/// Pairs of numbers in a panel of an operand whose outer dimension is contiguous.
const PANEL_PAIRS: usize = PANEL * DEPTH / 2;

/// Planes of the consumers.
pub const CONSUMER_PLANES: u32 = 8;

/// A ring of tiles of both operands, filled by TMA and read by both warpgroups.
#[derive(CubeType)]
pub struct OperandRing {
    pub left: Shared<[Pair]>,
    pub right: Shared<[Pair]>,
    /// Barriers: both tiles have arrived.
    pub full: Shared<[u64]>,
    /// Barriers: all planes have read them.
    pub free: Shared<[u64]>,
}

/// The ring of a plan. Its barriers are ready after the next barrier of the cube.
#[cube]
pub fn operand_ring(#[comptime] plan: GroupedPlan) -> OperandRing {
    let left = Shared::<[Pair]>::new_aligned_slice(comptime![plan.stages * plan.left_tile()], 1024usize);
    let right = Shared::<[Pair]>::new_aligned_slice(comptime![plan.stages * plan.right_tile()], 1024usize);
    let full = Shared::<[u64]>::new_slice(plan.stages);
    let free = Shared::<[u64]>::new_slice(plan.stages);
    if UNIT_POS == 0 {
        #[unroll]
        for stage in 0..plan.stages {
            barrier_at(&full, stage).init_manual(1);
            barrier_at(&free, stage).init_manual(CONSUMER_PLANES);
        }
    }
    OperandRing { left, right, full, free }
}

/// Layout in which a warpgroup MMA reads the left tile.
pub fn left_layout(plan: GroupedPlan) -> WgmmaTileLayout {
    match plan.gemm {
        Gemm::WeightGradient => mma::mn_major(ROWS, DEPTH),
        _ => mma::k_major(ROWS, DEPTH),
    }
}

/// Layout in which a warpgroup MMA reads the right tile.
pub fn right_layout(plan: GroupedPlan) -> WgmmaTileLayout {
    match plan.gemm {
        Gemm::Forward => mma::k_major(plan.width, DEPTH),
        _ => mma::mn_major(plan.width, DEPTH),
    }
}

/// Starts the TMA loads of the operands of step `step` of `tile` into stage `stage`, after its tiles have been read;
/// `parity` is the phase of the barriers that stands for these tiles.
#[cube]
pub fn load(
    to: &mut OperandRing,
    left: &TensorMap<bf16, Tiled>,
    right: &TensorMap<bf16, Tiled>,
    tile: &Tile,
    step: u32,
    stage: usize,
    parity: u32,
    #[comptime] plan: GroupedPlan,
) {
    let (left_tile, right_tile) = comptime![(plan.left_tile(), plan.right_tile())];
    barrier_at(&to.free, stage).wait_parity(parity ^ 1);
    let full = barrier_at(&to.full, stage);
    full.arrive_and_expect_tx(1, comptime![(4 * (left_tile + right_tile)) as u32]);
    let inner = (step * comptime![DEPTH as u32]) as i32;
    let line = (tile.first + step * comptime![DEPTH as u32]) as i32;
    let row = (tile.row * comptime![ROWS as u32]) as i32;
    let column = (tile.column * comptime![plan.width as u32]) as i32;
    if comptime![plan.gemm == Gemm::WeightGradient] {
        #[unroll]
        for p in 0..comptime![ROWS / PANEL] {
            let from = stage * left_tile + comptime![p * PANEL_PAIRS];
            let target = to.left.slice_mut(from, from + comptime![PANEL_PAIRS]);
            full.tma_load_2d(left, target, line, row + comptime![(p * PANEL) as i32]);
        }
    } else {
        let from = stage * left_tile;
        full.tma_load_2d(left, to.left.slice_mut(from, from + left_tile), row, inner);
    }
    if comptime![plan.gemm == Gemm::Forward] {
        let from = stage * right_tile;
        let target = to.right.slice_mut(from, from + right_tile);
        full.tma_load_2d(right, target, tile.first as i32 + column, inner);
    } else {
        #[unroll]
        for p in 0..comptime![plan.width / PANEL] {
            let from = stage * right_tile + comptime![p * PANEL_PAIRS];
            let target = to.right.slice_mut(from, from + comptime![PANEL_PAIRS]);
            full.tma_load_2d(right, target, line, column + comptime![(p * PANEL) as i32]);
        }
    }
}
