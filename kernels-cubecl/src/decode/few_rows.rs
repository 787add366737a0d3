//! Linear layers of a few rows: the tokens of a decode step, or those that an expert has of them. The time is that of
//! reading the weights, so each is read once, by a plane that has several loads in flight and all rows in registers. Where
//! the features are `[gate | up]` of SwiGLU, a plane has both of some, and writes `silu(gate) up`.
#![allow(missing_docs, reason = "the launch macros write public items without documentation")]

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::few_rows_mma as mma;
use super::rows::{rows_of_cube, source};
use super::{FewRows, MOST_COPIES, MOST_FEATURES, MOST_ROWS, Rows};
use crate::pointwise::gated::gated;
use crate::pointwise::{CubeShape, PointwiseError, Vec8, buffer, check, plane_total};

/// Vectors of weights that a unit has in flight.
const IN_FLIGHT: usize = 8;
/// Fewer planes than this leave SMs idle.
const BUSY: usize = 2048;

/// How a cube divides the features.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Plan {
    /// The cube.
    pub cube: CubeShape,
    /// Features of a plane.
    pub features: usize,
    /// Rows that it computes at the same time.
    pub rows: usize,
    /// Vectors of a feature that a unit has in flight.
    pub ahead: usize,
    /// Whether half of its features are gates of the others.
    pub gated: bool,
}

impl Plan {
    fn new(sizes: &FewRows, cube: CubeShape, gated: bool) -> Self {
        let FewRows { rows, groups, features, inner } = *sizes;
        // Few experts have more than their share.
        let rows = (2 * rows / groups).clamp(1, MOST_ROWS.min(rows));
        let columns = inner / 8 / cube.plane as usize;
        let ahead = [8, 4, 2, 1].into_iter().find(|ahead| columns.is_multiple_of(*ahead)).unwrap_or(1);
        // Sums of many features are held for many rows.
        let most = if rows > 1 { 4 } else { IN_FLIGHT / ahead };
        let busy = |own: &usize| *own <= most && (*own == 1 || groups * features / own >= BUSY);
        let least = if gated { 2 } else { 1 };
        let own = [MOST_FEATURES, 2, 1].into_iter().find(busy).unwrap_or(least).max(least);
        Self { cube, features: own, rows, ahead: ahead.min(if rows > 1 { 2 } else { IN_FLIGHT / own }), gated }
    }

    /// Features that a plane writes.
    fn written(self) -> usize {
        if self.gated { self.features / 2 } else { self.features }
    }
}

/// Cube `(features, group)`.
#[cube(launch_unchecked)]
pub fn few_rows<E: Float>(
    x: &[Vec8<E>],
    w: &[Vec8<E>],
    slots: &[i32],
    out: &mut [E],
    width: u32,
    features: u32,
    groups: u32,
    all: u32,
    #[comptime] of: Rows,
    #[comptime] plan: Plan,
) {
    let (own, rows, ahead, written) = comptime![(plan.features, plan.rows, plan.ahead, plan.written())];
    let plane = comptime![plan.cube.plane];
    let (group, first, end) = rows_of_cube(slots, groups, all, of, plan.cube);
    let mut row = first;
    let lane = UNIT_POS % plane;
    let mut outputs = features;
    if comptime![plan.gated] {
        outputs = features / 2;
    }
    let feature = (CUBE_POS_X * comptime![plan.cube.planes() as u32] + UNIT_POS / plane) * comptime![written as u32];
    if feature < outputs {
        let matrix = (group * features + feature) * width;
        while row < end {
            let mut sums = Array::<f32>::new(comptime![own * rows]);
            #[unroll]
            for i in 0..comptime![own * rows] {
                sums[i] = 0.0f32;
            }
            let mut column = lane;
            while column < width {
                let mut of_w = Array::<Vec8<E>>::new(comptime![own * ahead]);
                let mut of_x = Array::<Vec8<E>>::new(comptime![rows * ahead]);
                #[unroll]
                for a in 0..ahead {
                    let at = column + comptime![a as u32 * plane];
                    #[unroll]
                    for f in 0..own {
                        let mut line = comptime![f as u32].runtime();
                        if comptime![f >= written] {
                            line = outputs + comptime![(f - written) as u32];
                        }
                        of_w[comptime![a * own + f]] = w[(matrix + line * width + at) as usize];
                    }
                    #[unroll]
                    for n in 0..rows {
                        // Past the last row, that row is computed again.
                        let source = source(slots, groups, min(row + comptime![n as u32], end - 1), of);
                        of_x[comptime![a * rows + n]] = x[(source * width + at) as usize];
                    }
                }
                #[unroll]
                for a in 0..ahead {
                    #[unroll]
                    for i in 0..8usize {
                        #[unroll]
                        for f in 0..own {
                            let weight = f32::cast_from(of_w[comptime![a * own + f]].extract(i));
                            #[unroll]
                            for n in 0..rows {
                                let value = f32::cast_from(of_x[comptime![a * rows + n]].extract(i));
                                sums[comptime![f * rows + n]] += weight * value;
                            }
                        }
                    }
                }
                column += comptime![ahead as u32 * plane];
            }
            #[unroll]
            for f in 0..written {
                #[unroll]
                for n in 0..rows {
                    let at = comptime![f * rows + n];
                    let mut value = E::cast_from(plane_total(sums[at], plan.cube));
                    if comptime![plan.gated] {
                        let up = E::cast_from(plane_total(sums[comptime![at + written * rows]], plan.cube));
                        value = E::cast_from(gated(f32::cast_from(value), f32::cast_from(up)));
                    }
                    let to = row + comptime![n as u32];
                    if lane == comptime![at as u32 % plane] && to < end {
                        out[(to * outputs + feature + comptime![f as u32]) as usize] = value;
                    }
                }
            }
            row += comptime![rows as u32];
        }
    }
}

/// `out [rows, features] = x wᵀ`, sums in fp32. `slots [rows]` are i32 numbers that are read on the device: of which row of
/// `x` and which matrix a row is, see [`Rows`]. Without them all rows have the same matrix.
///
/// # Errors
/// If there is no kernel for these sizes, or a buffer is too small.
pub fn linear<E: Float>(
    client: &Client,
    sizes: FewRows,
    tensors: [&Handle; 3],
    slots: Option<(&Handle, Rows)>,
) -> Result<(), PointwiseError> {
    launch::<E>(client, sizes, tensors, slots, false)
}

/// `out [rows, features / 2] = silu(gate) up` of the features `[gate | up] = x wᵀ`, which are rounded before.
///
/// # Errors
/// As [`linear`].
pub fn gated_linear<E: Float>(client: &Client, sizes: FewRows, tensors: [&Handle; 3]) -> Result<(), PointwiseError> {
    launch::<E>(client, sizes, tensors, None, true)
}

fn launch<E: Float>(
    client: &Client,
    sizes: FewRows,
    [x, w, out]: [&Handle; 3],
    slots: Option<(&Handle, Rows)>,
    gated: bool,
) -> Result<(), PointwiseError> {
    let FewRows { rows, groups, features, inner } = sizes;
    if !sizes.has_kernel() || (slots.is_none() && groups > 1) {
        return Err(PointwiseError::Shape { shape: format!("{sizes:?}") });
    }
    // Rows of groups are counted in fp32.
    check("rows", rows, 1, if slots.is_some() { MOST_COPIES } else { i32::MAX as usize })?;
    let (cube, width) = (CubeShape::of(client), inner / 8);
    // Without slots nothing is read from their buffer.
    let (table, of) = slots.unwrap_or((x, Rows::All));
    // Gathered rows may be any of as many or fewer.
    let read = if of == Rows::Gathered { x.size_in_used() as usize / (8 * size_of::<E>()) } else { rows * width };
    let x = buffer("x", x, read, 8 * size_of::<E>())?;
    let w = buffer("w", w, groups * features * width, 8 * size_of::<E>())?;
    let table = buffer("slots", table, if of == Rows::All { 1 } else { rows }, 4)?;
    let out = buffer("out", out, rows * features / if gated { 2 } else { 1 }, size_of::<E>())?;
    let [width, of_matrix, matrices, all] = [width, features, groups, rows].map(|n| n as u32);
    let cubes = |of_plane: usize| {
        CubeCount::Static(features.div_ceil(cube.planes() * of_plane) as u32, groups.min(rows) as u32, 1)
    };
    // SAFETY: a plane stays in its features and in the rows of its group; the buffers hold them.
    unsafe {
        if mma::is_faster::<E>(client, &sizes) {
            let (plan, count) = (mma::Plan::new(&sizes, cube), cubes(mma::FEATURES));
            launch_kernel!(mma::few_rows_mma<E>, client, count, cube.dim();
                x, w, table, out; width, of_matrix, matrices, all; of, plan);
        } else {
            let plan = Plan::new(&sizes, cube, gated);
            let count = cubes(plan.features);
            launch_kernel!(few_rows<E>, client, count, cube.dim();
                x, w, table, out; width, of_matrix, matrices, all; of, plan);
        }
    }
    Ok(())
}
