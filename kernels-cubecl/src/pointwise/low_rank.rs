//! `y += x · w` where a row of `x` is short, as for adapters: a GEMM whose time is that of reading and writing `y`.
//!
//! A plane has its columns of `w` in registers, and goes through the rows. In an instruction, a unit holds two columns of
//! the result, which may be any two as long as `w` has the same order: here four instructions give a unit eight
//! neighbours, one access to memory. The order of the terms of a sum is free too.
use super::{CubeShape, PointwiseError, Vec8, buffer, check};
use crate::attention::portable::mma::has_mma;
use crate::attention::portable::mma::tile::{Acc2, Pair, accumulators, multiply};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Columns of a plane.
pub(super) const COLUMNS: usize = 32;
/// Rows of an instruction.
pub(super) const LINES: usize = 16;
/// Rows of a cube. A plane loads its part of `w` once for them.
pub(super) const ROWS: usize = 128;
/// Instructions' rows that a plane has in flight.
const AHEAD: usize = 4;
/// Longest row of `x`.
const LONGEST: usize = 64;
/// Four neighbours.
pub(super) type Vec4<E> = Vector<E, Const<4>>;

/// Sizes of `x [rows, inner]`, `w` and `y [rows, columns]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LowRank {
    /// Rows of `x` and `y`.
    pub rows: usize,
    /// Columns of `y`.
    pub columns: usize,
    /// Columns of `x`.
    pub inner: usize,
    /// `w` is `[columns, inner]`, else `[inner, columns]`.
    pub transposed: bool,
}

impl LowRank {
    /// Whether there is a kernel: rows in 128s, columns in 256s, up to 64 columns of `x` in 16s, and a device with
    /// `mma.sync`.
    pub fn has_kernel<E: Float>(&self, client: &Client) -> bool {
        let Self { rows, columns, inner, .. } = *self;
        let most = i32::MAX as usize;
        check("rows", rows, ROWS, most).is_ok()
            && check("columns", columns, COLUMNS * CubeShape::GPU.planes(), most).is_ok()
            && check("inner", inner, 16, LONGEST).is_ok()
            && rows.checked_mul(columns).is_some_and(|len| len / 8 <= most)
            && has_mma::<E>(client)
    }
}

/// What is known when the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Plan {
    /// Sixteens of columns of `x`.
    pub steps: usize,
    /// As [`LowRank::transposed`].
    pub transposed: bool,
}

/// Four neighbours of `x`'s columns `first ..` of a unit, for the rows of an instruction's upper and lower half.
#[cube]
pub(super) fn left<E: Float>(upper: Vec4<E>, lower: Vec4<E>) -> Array<Pair<E>> {
    let mut registers = Array::<Pair<E>>::new(4usize);
    #[unroll]
    for half in 0..2usize {
        let mut above = Pair::<E>::empty();
        let mut below = Pair::<E>::empty();
        #[unroll]
        for i in 0..2usize {
            above.insert(i, upper.extract(comptime![2 * half + i]));
            below.insert(i, lower.extract(comptime![2 * half + i]));
        }
        registers[comptime![2 * half]] = above;
        registers[comptime![2 * half + 1]] = below;
    }
    registers
}

/// The columns of `w` of a plane, for each sixteen of rows of `w` four instructions' right operands.
#[cube]
pub(super) fn right<E: Float>(w: &[E], first: u32, columns: u32, #[comptime] plan: Plan) -> Sequence<Array<Pair<E>>> {
    let (line, quarter) = (UNIT_POS % 32 / 4, UNIT_POS % 4);
    let mut all = Sequence::<Array<Pair<E>>>::new();
    #[unroll]
    for step in 0..plan.steps {
        #[unroll]
        for nth in 0..4usize {
            let column = first + line / 2 * 8 + line % 2 + comptime![2 * nth as u32];
            let mut registers = Array::<Pair<E>>::new(2usize);
            #[unroll]
            for half in 0..2usize {
                let mut pair = Pair::<E>::empty();
                #[unroll]
                for i in 0..2usize {
                    let row = 4 * quarter + comptime![(16 * step + 2 * half + i) as u32];
                    let mut at = row * columns + column;
                    if comptime![plan.transposed] {
                        at = column * comptime![16 * plan.steps as u32] + row;
                    }
                    pair.insert(i, w[at as usize]);
                }
                registers[half] = pair;
            }
            all.push(registers);
        }
    }
    all
}

/// Eight numbers of `y` with what is added to them, by the accumulators of the upper or lower rows.
#[cube]
fn plus<E: Float>(y: Vec8<E>, acc: &Sequence<Array<Acc2>>, #[comptime] half: usize) -> Vec8<E> {
    let mut sum = Vec8::<E>::empty();
    #[unroll]
    for nth in 0..4usize {
        let added = acc.index(nth)[half];
        #[unroll]
        for i in 0..2usize {
            let before = f32::cast_from(y.extract(comptime![2 * nth + i]));
            sum.insert(comptime![2 * nth + i], E::cast_from(before + added.extract(i)));
        }
    }
    sum
}

/// Cube `(columns, rows)`.
#[cube(launch_unchecked)]
pub fn low_rank<E: Float>(x: &[Vec4<E>], w: &[E], y: &mut [Vec8<E>], columns: u32, #[comptime] plan: Plan) {
    let (line, quarter) = (UNIT_POS % 32 / 4, UNIT_POS % 4);
    let first = (CUBE_POS_X * (CUBE_DIM_X / 32) + UNIT_POS / 32) * comptime![COLUMNS as u32];
    let width = columns / 8;
    let short = comptime![4 * plan.steps as u32];
    let of_w = right::<E>(w, first, columns, plan);
    let mut row = CUBE_POS_Y * comptime![ROWS as u32] + line;
    let end = row + comptime![ROWS as u32];
    while row < end {
        let mut uppers = Array::<Vec8<E>>::new(AHEAD);
        let mut lowers = Array::<Vec8<E>>::new(AHEAD);
        #[unroll]
        for a in 0..AHEAD {
            let at = (row + comptime![(a * LINES) as u32]) * width + first / 8 + quarter;
            uppers[a] = y[at as usize];
            lowers[a] = y[(at + 8 * width) as usize];
        }
        #[unroll]
        for a in 0..AHEAD {
            let row = row + comptime![(a * LINES) as u32];
            let mut acc = accumulators(COLUMNS);
            #[unroll]
            for step in 0..plan.steps {
                let at = row * short + quarter + comptime![4 * step as u32];
                let operand = left::<E>(x[at as usize], x[(at + 8 * short) as usize]);
                #[unroll]
                for nth in 0..4usize {
                    multiply(acc.index_mut(nth), &operand, of_w.index(comptime![4 * step + nth]));
                }
            }
            let at = row * width + first / 8 + quarter;
            y[at as usize] = plus::<E>(uppers[a], &acc, 0usize);
            y[(at + 8 * width) as usize] = plus::<E>(lowers[a], &acc, 1usize);
        }
        row += comptime![(LINES * AHEAD) as u32];
    }
}

/// `y [rows, columns] += x [rows, inner] · w`, sums in fp32, of type `E` (2 bytes) and without gaps.
///
/// # Errors
/// If there is no kernel for these sizes, or a buffer is too small.
pub fn add<E: Float>(client: &Client, sizes: LowRank, [x, w, y]: [&Handle; 3]) -> Result<(), PointwiseError> {
    let LowRank { rows, columns, inner, transposed } = sizes;
    if !sizes.has_kernel::<E>(client) {
        return Err(PointwiseError::Shape { shape: format!("{sizes:?}") });
    }
    let (cube, plan) = (CubeShape::GPU, Plan { steps: inner / 16, transposed });
    let x = buffer("x", x, rows * inner / 4, 4 * size_of::<E>())?;
    let w = buffer("w", w, columns * inner, size_of::<E>())?;
    let y = buffer("y", y, rows * columns / 8, 8 * size_of::<E>())?;
    let of = [columns / (COLUMNS * cube.planes()), rows / ROWS].map(|n| n as u32);
    let cubes = CubeCount::Static(of[0], of[1], 1);
    // SAFETY: cubes divide columns and rows without a rest, and the buffers hold them.
    unsafe { low_rank::launch_unchecked::<E>(client, cubes, cube.dim(), x, w, y, columns as u32, plan) };
    Ok(())
}
