//! `y += x · w` where a row of `x` is short, as for adapters: a GEMM whose time is that of reading and writing `y`.
//!
//! A plane has its columns of `w` in registers, and goes through the rows of `x`, which are the right operands of the
//! instructions, so that its results are columns of `yᵀ`. A unit holds two rows of the result and of each instruction
//! two columns, which may be any two as long as `w` has the same order: here four instructions give it eight neighbours,
//! one access to memory, and eight units a whole line of 128 bytes. The order of the terms of a sum is free too.
use super::{CubeShape, PointwiseError, Vec8, buffer, check};
use crate::attention::portable::mma::has_mma;
use crate::attention::portable::mma::tile::{Acc2, Pair, accumulators, multiply};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Columns of a plane.
pub(super) const COLUMNS: usize = 64;
/// Rows of an instruction.
pub(super) const LINES: usize = 8;
/// Rows of a cube. A plane loads its part of `w` once for them.
pub(super) const ROWS: usize = 128;
/// Longest row of `x`.
const LONGEST: usize = 64;
/// Registers are what limits an SM, so that small cubes fill it better.
pub(super) const CUBE: CubeShape = CubeShape { units: 128, plane: 32 };
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
            && check("columns", columns, COLUMNS * CUBE.planes(), most).is_ok()
            && check("inner", inner, 16, LONGEST).is_ok()
            && rows.checked_mul(columns).is_some_and(|len| len / 8 <= most)
            && has_mma::<E>(client)
    }

    /// How the kernels divide the work.
    pub(super) fn launch(&self, ahead: usize) -> (CubeCount, usize, Plan) {
        let of = [self.columns / (COLUMNS * CUBE.planes()), self.rows / ROWS];
        let plan = Plan { steps: self.inner / 16, transposed: self.transposed, ahead };
        (CubeCount::Static(of[0] as u32, of[1] as u32, 1), of[0] * of[1], plan)
    }
}

/// What is known when the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Plan {
    /// Sixteens of columns of `x`.
    pub steps: usize,
    /// As [`LowRank::transposed`].
    pub transposed: bool,
    /// Instructions' rows that a plane has in flight.
    pub ahead: usize,
}

/// A unit's part of the transposed columns of `w` of its plane: for each sixteen of rows of `w` four instructions' left
/// operands.
#[cube]
pub(super) fn columns_of<E: Float>(
    w: &[Vec4<E>],
    first: u32,
    columns: u32,
    #[comptime] plan: Plan,
) -> Sequence<Array<Pair<E>>> {
    let (column, quarter) = (first + UNIT_POS % 32 / 4 * 8, UNIT_POS % 4);
    let short = comptime![4 * plan.steps as u32];
    let mut all = Sequence::<Array<Pair<E>>>::new();
    #[unroll]
    for step in 0..plan.steps {
        // Four rows of `w`, or eight of its columns.
        let mut read = Array::<Vec4<E>>::new(8usize);
        #[unroll]
        for i in 0..8usize {
            let mut at = (comptime![(16 * step + i / 2) as u32] + 4 * quarter) * (columns / 4) + column / 4;
            at += comptime![(i % 2) as u32];
            if comptime![plan.transposed] {
                at = (column + comptime![i as u32]) * short + comptime![4 * step as u32] + quarter;
            }
            read[i] = w[at as usize];
        }
        #[unroll]
        for nth in 0..4usize {
            let mut registers = Array::<Pair<E>>::new(4usize);
            #[unroll]
            for part in 0..4usize {
                let (column, row) = comptime![(2 * nth + part % 2, part / 2 * 2)];
                let mut pair = Pair::<E>::empty();
                #[unroll]
                for i in 0..2usize {
                    if comptime![plan.transposed] {
                        pair.insert(i, read[column].extract(comptime![row + i]));
                    } else {
                        pair.insert(i, read[comptime![2 * (row + i) + column / 4]].extract(comptime![column % 4]));
                    }
                }
                registers[part] = pair;
            }
            all.push(registers);
        }
    }
    all
}

/// A unit's part of the rows of `x` that are in flight: for each eight of them, and each sixteen of columns, a right
/// operand. Read before anything is written, which might be the same memory for the compiler. A row of `x` has `pitch`
/// sixteens, of which those from `first` on are read.
#[cube]
pub(super) fn rows_of<E: Float>(
    x: &[Vec4<E>],
    row: u32,
    #[comptime] plan: Plan,
    #[comptime] first: usize,
    #[comptime] pitch: usize,
) -> Sequence<Array<Pair<E>>> {
    let short = comptime![4 * pitch as u32];
    let at = (row + UNIT_POS % 32 / 4) * short + comptime![4 * first as u32] + UNIT_POS % 4;
    let mut all = Sequence::<Array<Pair<E>>>::new();
    #[unroll]
    for i in 0..comptime![plan.ahead * plan.steps] {
        let read = x[(at + comptime![(i / plan.steps * LINES) as u32 * short + (i % plan.steps * 4) as u32]) as usize];
        let mut registers = Array::<Pair<E>>::new(2usize);
        #[unroll]
        for half in 0..2usize {
            let mut pair = Pair::<E>::empty();
            #[unroll]
            for i in 0..2usize {
                pair.insert(i, read.extract(comptime![2 * half + i]));
            }
            registers[half] = pair;
        }
        all.push(registers);
    }
    all
}

/// A unit's eight columns of the GEMM in two rows, of the eight with number `a`.
#[cube]
pub(super) fn multiplied<E: Float>(
    columns: &Sequence<Array<Pair<E>>>,
    rows: &Sequence<Array<Pair<E>>>,
    #[comptime] a: usize,
    #[comptime] plan: Plan,
) -> Sequence<Array<Acc2>> {
    let mut acc = accumulators(COLUMNS / 2);
    #[unroll]
    for step in 0..plan.steps {
        #[unroll]
        for nth in 0..4usize {
            multiply(
                acc.index_mut(nth),
                columns.index(comptime![4 * step + nth]),
                rows.index(comptime![a * plan.steps + step]),
            );
        }
    }
    acc
}

/// Number `i` of eight neighbours of `y`, with what [`multiplied`] adds to it in the first or second row.
#[cube]
pub(super) fn plus<E: Float>(
    y: Vec8<E>,
    acc: &Sequence<Array<Acc2>>,
    #[comptime] row: usize,
    #[comptime] i: usize,
) -> f32 {
    f32::cast_from(y.extract(i)) + acc.index(comptime![i / 2])[comptime![i % 2]].extract(row)
}

/// Eight neighbours of `y`, with what [`multiplied`] adds to them in the first or second row.
#[cube]
pub(super) fn sum<E: Float>(y: Vec8<E>, acc: &Sequence<Array<Acc2>>, #[comptime] row: usize) -> Vec8<E> {
    let mut sum = Vec8::<E>::empty();
    #[unroll]
    for i in 0..8usize {
        sum.insert(i, E::cast_from(plus::<E>(y, acc, row, i)));
    }
    sum
}

/// Cube `(columns, rows)`.
#[cube(launch_unchecked)]
pub fn low_rank<E: Float>(x: &[Vec4<E>], w: &[Vec4<E>], y: &mut [Vec8<E>], columns: u32, #[comptime] plan: Plan) {
    let first = (CUBE_POS_X * comptime![CUBE.planes() as u32] + UNIT_POS / 32) * comptime![COLUMNS as u32];
    let (width, column) = (columns / 8, first / 8 + UNIT_POS % 32 / 4);
    let of_w = columns_of::<E>(w, first, columns, plan);
    let mut row = CUBE_POS_Y * comptime![ROWS as u32];
    let end = row + comptime![ROWS as u32];
    while row < end {
        let at = (row + UNIT_POS % 4 * 2) * width + column;
        let mut before = Array::<Vec8<E>>::new(comptime![2 * plan.ahead]);
        #[unroll]
        for i in 0..comptime![2 * plan.ahead] {
            before[i] = y[(at + comptime![(i / 2 * LINES + i % 2) as u32] * width) as usize];
        }
        let of_x = rows_of::<E>(x, row, plan, 0usize, comptime![plan.steps]);
        #[unroll]
        for a in 0..plan.ahead {
            let acc = multiplied::<E>(&of_w, &of_x, a, plan);
            #[unroll]
            for of in 0..2usize {
                let at = at + comptime![(a * LINES + of) as u32] * width;
                y[at as usize] = sum::<E>(before[comptime![2 * a + of]], &acc, of);
            }
        }
        row += comptime![(LINES * plan.ahead) as u32];
    }
}

/// `y [rows, columns] += x [rows, inner] · w`, sums in fp32, of type `E` (2 bytes) and without gaps.
///
/// # Errors
/// If there is no kernel for these sizes, or a buffer is too small.
pub fn add<E: Float>(client: &Client, sizes: LowRank, [x, w, y]: [&Handle; 3]) -> Result<(), PointwiseError> {
    let LowRank { rows, columns, inner, .. } = sizes;
    if !sizes.has_kernel::<E>(client) {
        return Err(PointwiseError::Shape { shape: format!("{sizes:?}") });
    }
    let (cubes, _, plan) = sizes.launch(4);
    let x = buffer("x", x, rows * inner / 4, 4 * size_of::<E>())?;
    let w = buffer("w", w, columns * inner / 4, 4 * size_of::<E>())?;
    let y = buffer("y", y, rows * columns / 8, 8 * size_of::<E>())?;
    // SAFETY: cubes divide columns and rows without a rest, and the buffers hold them.
    unsafe { low_rank::launch_unchecked::<E>(client, cubes, CUBE.dim(), x, w, y, columns as u32, plan) };
    Ok(())
}
