//! The kernel of all grouped products.
use super::copy::{self, READERS, Tiles};
use super::output;
use super::plan::{GroupedPlan, Product};
use super::tiles::{DEPTH, Place, WORDS};
use crate::hopper::mma::{self, STEP};
use crate::hopper::ring::barrier_at;
use cubecl::prelude::*;
use half::bf16;

/// Units of a cube: two warpgroups that multiply and a plane that drives the copy engine.
pub const UNITS: u32 = 288;

/// The numbers of a call.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct Sizes {
    /// Tiles of all results.
    pub tiles: u32,
    /// Columns of tiles.
    pub columns: u32,
    /// Rows of tiles of a group's result, for the gradient of the weights.
    pub rows: u32,
    /// Rows of a group's matrix.
    pub features: u32,
    /// Steps along the inner dimension, but for the gradient of the weights.
    pub steps: u32,
}

/// A tile of a result.
#[derive(CubeType)]
pub struct Tile {
    pub group: u32,
    /// Row of tiles: of all rows, or of the group's matrix.
    pub row: u32,
    /// Column of tiles.
    pub column: u32,
    /// First row of the group's matrix, or of the group.
    pub first: u32,
    /// Steps along the inner dimension, at least one.
    pub steps: u32,
}

/// Tile number `index`, with a table as [`super::tiles`] makes them.
#[cube]
fn tile(index: u32, table: &[u32], sizes: &Sizes, #[comptime] product: Product) -> Tile {
    let words = comptime![WORDS as u32];
    if comptime![product == Product::WeightGradient] {
        let each = sizes.rows * sizes.columns;
        let entry = index / each;
        let at = (entry * words) as usize;
        let place = Place::in_matrix(index - entry * each, sizes.rows, sizes.columns);
        Tile { group: table[at], row: place.row, column: place.column, first: table[at + 1], steps: table[at + 2] }
    } else {
        let at = (index / sizes.columns * words) as usize;
        let first = table[at];
        let place = Place::in_band(index - first * sizes.columns, first, table[at + 1]);
        let group = table[at + 2];
        Tile { group: 0u32, row: place.row, column: place.column, first: group * sizes.features, steps: sizes.steps }
    }
}

/// `plan.product` of all groups. [`UNITS`] units, any number of cubes up to `sizes.tiles`, tensor maps as `maps` makes
/// them for the plan, `table` of [`super::tiles`].
#[cube(launch_unchecked)]
pub fn grouped<O: Float>(
    left: &TensorMap<bf16, Tiled>,
    right: &TensorMap<bf16, Tiled>,
    out: &mut TensorMap<O, Tiled>,
    table: &[u32],
    sizes: Sizes,
    #[comptime] plan: GroupedPlan,
) {
    let mut tiles = copy::tiles(plan);
    let mut staging = output::staging(plan);
    sync_async_proxy_shared();
    sync_cube();
    let plane = plane_broadcast(UNIT_POS / 32, 0u32);
    if plane == READERS {
        if UNIT_POS % 32 == 0 {
            bring(&mut tiles, left, right, out, table, &sizes, plan);
        }
    } else {
        multiply(&mut tiles, &mut staging, out, table, &sizes, plane, plan);
    }
}

/// Brings the operands of all of the cube's tiles, and nearer what they are added to.
#[cube]
fn bring<O: Float>(
    tiles: &mut Tiles,
    left: &TensorMap<bf16, Tiled>,
    right: &TensorMap<bf16, Tiled>,
    out: &mut TensorMap<O, Tiled>,
    table: &[u32],
    sizes: &Sizes,
    #[comptime] plan: GroupedPlan,
) {
    let mut stage = 0u32;
    let mut parity = 0u32;
    let mut index = CUBE_POS_X;
    while index < sizes.tiles {
        let tile = tile(index, table, sizes, plan.product);
        for step in 0..tile.steps {
            copy::load(tiles, left, right, &tile, step, stage as usize, parity, plan);
            if comptime![plan.ahead] {
                output::prefetch(out, &tile, step, plan);
            }
            stage += 1;
            if stage == comptime![plan.stages as u32] {
                stage = 0u32;
                parity = parity ^ 1;
            }
        }
        index += CUBE_COUNT_X;
    }
}

/// Computes the cube's tiles, 64 rows a warpgroup.
#[cube]
fn multiply<O: Float>(
    tiles: &mut Tiles,
    staging: &mut Shared<[u32]>,
    out: &mut TensorMap<O, Tiled>,
    table: &[u32],
    sizes: &Sizes,
    plane: u32,
    #[comptime] plan: GroupedPlan,
) {
    let left_layout = comptime![copy::left_layout(plan)];
    let right_layout = comptime![copy::right_layout(plan)];
    let half = comptime![mma::advance(left_layout, mma::ROWS, 0)];
    let left = mma::descriptor(tiles.left.as_slice(), left_layout) + (plane / 4) as u64 * half;
    let right = mma::descriptor(tiles.right.as_slice(), right_layout);
    let mut sum = Array::<f32>::new(comptime![plan.width / 2]);
    let mut stage = 0u32;
    let mut parity = 0u32;
    let mut index = CUBE_POS_X;
    loop {
        let tile = tile(index, table, sizes, plan.product);
        mma::fill(&mut sum, 0.0, comptime![plan.width / 2]);
        let mut before = 0u32;
        let mut step = 0u32;
        loop {
            barrier_at(&tiles.full, stage as usize).wait_parity(parity);
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
                release(tiles, before);
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
        release(tiles, before);
        output::write(&sum, staging, out, &tile, plane, plan);
        index += CUBE_COUNT_X;
        if index >= sizes.tiles {
            break;
        }
    }
    output::finish();
}

/// Says that this plane has read the tiles at place `stage`.
#[cube]
fn release(tiles: &mut Tiles, stage: u32) {
    if UNIT_POS % 32 == 0 {
        barrier_at(&tiles.free, stage as usize).arrive();
    }
}
