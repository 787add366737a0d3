//! The grouped GEMM kernel: a producer plane and two consumer warpgroups.
use super::epilogue;
use super::operand_ring::{self, CONSUMER_PLANES, OperandRing};
use super::plan::{Epilogue, Gemm, GroupedPlan};
use super::tiles::{DEPTH, Tile, TilePosition, WORDS};
use crate::hopper::barrier::barrier_at;
use crate::hopper::mma::{self, STEP};
use cubecl::prelude::*;
use half::bf16;

/// Units of a cube: two warpgroups that consume and a plane that issues the TMA loads.
pub const UNITS: u32 = 288;

/// Scalar arguments of a call.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Sizes {
    /// Tiles of all results.
    pub tiles: u32,
    /// Columns of tiles.
    pub columns: u32,
    /// Rows of tiles of a group's result; only for the weight gradient.
    pub rows: u32,
    /// Rows of a group's matrix.
    pub features: u32,
    /// Steps along the inner dimension; not for the weight gradient, whose groups have their own.
    pub steps: u32,
}

/// Tile number `index`, with a table of [`super::tiles`].
#[cube]
pub(super) fn tile(index: u32, table: &[u32], sizes: &Sizes, #[comptime] gemm: Gemm) -> Tile {
    let words = comptime![WORDS as u32];
    if comptime![gemm == Gemm::WeightGradient] {
        let each = sizes.rows * sizes.columns;
        let entry = index / each;
        let at = (entry * words) as usize;
        let position = TilePosition::in_matrix(index - entry * each, sizes.rows, sizes.columns);
        Tile {
            group: table[at],
            row: position.row,
            column: position.column,
            first: table[at + 1],
            steps: table[at + 2],
        }
    } else {
        let at = (index / sizes.columns * words) as usize;
        let first = table[at];
        let position = TilePosition::in_band(index - first * sizes.columns, first, table[at + 1]);
        let group = table[at + 2];
        Tile {
            group: 0u32,
            row: position.row,
            column: position.column,
            first: group * sizes.features,
            steps: sizes.steps,
        }
    }
}

/// `plan.gemm` of all groups. [`UNITS`] units, any number of cubes up to `sizes.tiles`, tensor maps of `maps` for the
/// plan, `table` of [`super::tiles`], `bias [groups · features]` of the type of the inputs and `factors [rows]` for
/// [`Epilogue::Biased`].
#[cube(launch_unchecked)]
pub fn grouped<O: Float>(
    left: &TensorMap<bf16, Tiled>,
    right: &TensorMap<bf16, Tiled>,
    out: &mut TensorMap<O, Tiled>,
    table: &[u32],
    bias: &[u32],
    factors: &[f32],
    sizes: Sizes,
    #[comptime] plan: GroupedPlan,
) {
    let mut ring = operand_ring::operand_ring(plan);
    let mut staging = epilogue::staging(plan);
    sync_async_proxy_shared();
    sync_cube();
    let plane = plane_broadcast(UNIT_POS / 32, 0u32);
    if plane == CONSUMER_PLANES {
        if UNIT_POS % 32 == 0 {
            produce(&mut ring, left, right, table, &sizes, plan);
        }
    } else {
        consume(&mut ring, &mut staging, out, table, bias, factors, &sizes, plane, plan);
    }
}

/// The producer: loads the operands of all of the cube's tiles.
#[cube]
fn produce(
    ring: &mut OperandRing,
    left: &TensorMap<bf16, Tiled>,
    right: &TensorMap<bf16, Tiled>,
    table: &[u32],
    sizes: &Sizes,
    #[comptime] plan: GroupedPlan,
) {
    let mut stage = 0u32;
    let mut parity = 0u32;
    let mut index = CUBE_POS_X;
    while index < sizes.tiles {
        let tile = tile(index, table, sizes, plan.gemm);
        for step in 0..tile.steps {
            operand_ring::load(ring, left, right, &tile, step, stage as usize, parity, plan);
            stage += 1;
            if stage == comptime![plan.stages as u32] {
                stage = 0u32;
                parity = parity ^ 1;
            }
        }
        index += CUBE_COUNT_X;
    }
}

/// The consumers: compute the cube's tiles, 64 rows per warpgroup.
#[cube]
fn consume<O: Float>(
    ring: &mut OperandRing,
    staging: &mut Shared<[u32]>,
    out: &mut TensorMap<O, Tiled>,
    table: &[u32],
    bias: &[u32],
    factors: &[f32],
    sizes: &Sizes,
    plane: u32,
    #[comptime] plan: GroupedPlan,
) {
    let left_layout = comptime![operand_ring::left_layout(plan)];
    let right_layout = comptime![operand_ring::right_layout(plan)];
    let half = comptime![mma::advance(left_layout, mma::ROWS, 0)];
    let left = mma::descriptor(ring.left.as_slice(), left_layout) + (plane / 4) as u64 * half;
    let right = mma::descriptor(ring.right.as_slice(), right_layout);
    let mut sum = Array::<f32>::new(comptime![plan.width / 2]);
    let mut stage = 0u32;
    let mut parity = 0u32;
    let mut index = CUBE_POS_X;
    loop {
        let tile = tile(index, table, sizes, plan.gemm);
        mma::fill(&mut sum, 0.0, comptime![plan.width / 2]);
        let mut before = 0u32;
        let mut step = 0u32;
        loop {
            barrier_at(&ring.full, stage as usize).wait_parity(parity);
            let left = left + stage as u64 * comptime![(plan.left_tile() * 4 / 16) as u64];
            let right = right + stage as u64 * comptime![(plan.right_tile() * 4 / 16) as u64];
            mma::pin(&mut sum);
            mma::fence();
            #[unroll]
            for s in 0..comptime![DEPTH / STEP] {
                let left = left + comptime![mma::advance(left_layout, 0, s * STEP)];
                let right = right + comptime![mma::advance(right_layout, 0, s * STEP)];
                mma::mma(&mut sum, left, right, plan.width, left_layout.major, right_layout.major, plan.element);
            }
            mma::commit();
            mma::wait(1usize);
            if step > 0 {
                release(ring, before);
            }
            before = stage;
            stage += 1;
            if stage == comptime![plan.stages as u32] {
                stage = 0u32;
                parity = parity ^ 1;
            }
            step += 1;
            if step == tile.steps {
                break;
            }
        }
        mma::wait(0usize);
        mma::pin(&mut sum);
        release(ring, before);
        if comptime![plan.epilogue == Epilogue::Biased] {
            epilogue::add_bias(&mut sum, bias, factors, &tile, sizes.features, plane, plan);
        }
        epilogue::store(&sum, staging, out, &tile, plane, plan);
        index += CUBE_COUNT_X;
        if index >= sizes.tiles {
            break;
        }
    }
    epilogue::drain();
}

/// Signals that this plane has read the tiles of stage `stage`.
#[cube]
pub(super) fn release(ring: &mut OperandRing, stage: u32) {
    if UNIT_POS % 32 == 0 {
        barrier_at(&ring.free, stage as usize).arrive();
    }
}
