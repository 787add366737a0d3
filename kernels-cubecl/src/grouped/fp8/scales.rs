//! What the sums of a step are multiplied by.
use super::plan::{Fp8Plan, Scaling};
use crate::fp8::BLOCK;
use crate::grouped::kernel::Sizes;
use crate::grouped::plan::Gemm;
use crate::grouped::tiles::{ROWS, Tile};
use cubecl::prelude::*;

/// Numbers between the scales of two groups.
pub const APART: usize = 4;

/// Two adjacent scales.
type Pair = Vector<f32, Const<2>>;

/// Scales of blocks in shared memory, in a ring next to that of the operands.
#[derive(CubeType)]
pub struct ScaleRing {
    /// Of the 128 rows of the left tile.
    pub left: Shared<[f32]>,
    /// Of the 128 rows of the right tile, or of four steps of a block of matrices.
    pub right: Shared<[Pair]>,
}

/// The ring of a plan.
#[cube]
pub fn scale_ring(#[comptime] plan: Fp8Plan) -> ScaleRing {
    let stages = comptime![if plan.scaling == Scaling::Blocks { plan.base.stages } else { 1 }];
    let left = Shared::<[f32]>::new_aligned_slice(comptime![stages * BLOCK], 128usize);
    let right = Shared::<[Pair]>::new_aligned_slice(comptime![stages * BLOCK / 2], 128usize);
    ScaleRing { left, right }
}

/// Right scales that a step of blocks loads.
pub fn right_scales(plan: Fp8Plan) -> usize {
    if plan.base.gemm == Gemm::WeightGradient { BLOCK } else { 4 }
}

/// The scales of a step for the two rows that a unit holds numbers of, and for its columns where these have their own.
#[derive(CubeType)]
pub struct StepScales {
    upper: f32,
    lower: f32,
    columns: Array<f32>,
}

/// Whether every column has its own scale.
fn of_columns(plan: Fp8Plan) -> bool {
    plan.scaling == Scaling::Blocks && plan.base.gemm == Gemm::WeightGradient
}

/// No scales yet.
#[cube]
pub fn step_scales(#[comptime] plan: Fp8Plan) -> StepScales {
    let columns = Array::<f32>::new(comptime![if of_columns(plan) { plan.base.width / 4 } else { 1 }]);
    StepScales { upper: 0.0f32, lower: 0.0f32, columns }
}

/// The product of the scales of both groups, or of a group and its matrix, of step `step`.
#[cube]
pub fn of_groups(
    tile: &Tile,
    step: u32,
    groups: &[u32],
    left: &[f32],
    right: &[f32],
    sizes: &Sizes,
    #[comptime] plan: Fp8Plan,
) -> f32 {
    let mut block = tile.row;
    if comptime![plan.base.gemm == Gemm::WeightGradient] {
        block = tile.first / comptime![ROWS as u32] + step;
    }
    let group = groups[block as usize];
    let mut matrix = group;
    if comptime![plan.base.gemm != Gemm::WeightGradient] {
        matrix = tile.first / sizes.features;
    }
    let apart = comptime![APART as u32];
    left[(group * apart) as usize] * right[(matrix * apart) as usize]
}

/// Sets all scales to `scale`.
#[cube]
pub fn set(scales: &mut StepScales, scale: f32) {
    scales.upper = scale;
    scales.lower = scale;
}

/// Reads the scales of blocks of step `step`, in stage `stage`, for a unit of plane `plane`.
#[cube]
pub fn read(scales: &mut StepScales, ring: &ScaleRing, step: u32, stage: u32, plane: u32, #[comptime] plan: Fp8Plan) {
    let lane = UNIT_POS % 32;
    let row = stage * comptime![BLOCK as u32] + plane * 16 + lane / 4;
    let (upper, lower) = (ring.left[row as usize], ring.left[(row + 8) as usize]);
    let right = stage * comptime![BLOCK as u32 / 2];
    if comptime![of_columns(plan)] {
        scales.upper = upper;
        scales.lower = lower;
        let right = right + lane % 4;
        #[unroll]
        for i in 0..comptime![plan.base.width / 8] {
            let pair = ring.right[(right + comptime![4 * i as u32]) as usize];
            scales.columns[2 * i] = pair.extract(0usize);
            scales.columns[2 * i + 1] = pair.extract(1usize);
        }
    } else {
        let pair = ring.right[(right + step % 4 / 2) as usize];
        let of_block = select(step % 2 == 0, pair.extract(0usize), pair.extract(1usize));
        scales.upper = upper * of_block;
        scales.lower = lower * of_block;
    }
}

/// Adds `sum` times its scales to `total`, and clears it.
#[cube]
pub fn promote(total: &mut Array<f32>, sum: &mut Array<f32>, scales: &StepScales, #[comptime] plan: Fp8Plan) {
    #[unroll]
    for i in 0..comptime![plan.base.width / 8] {
        #[unroll]
        for half in 0..2usize {
            let at = comptime![4 * i + half];
            if comptime![of_columns(plan)] {
                let column = scales.columns[comptime![2 * i + half]];
                total[at] += sum[at] * column * scales.upper;
                total[at + 2] += sum[at + 2] * column * scales.lower;
            } else {
                total[at] += sum[at] * scales.upper;
                total[at + 2] += sum[at + 2] * scales.lower;
            }
            sum[at] = 0.0f32;
            sum[at + 2] = 0.0f32;
        }
    }
}
