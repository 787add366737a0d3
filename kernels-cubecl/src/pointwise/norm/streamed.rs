//! The gradients of a normalisation, whose rows the copy engine brings to a ring in shared memory: what is on its way needs no
//! registers, and a cube has rows enough on their way to keep the memory busy while its units meet.
use super::backward::{Factors, leave, of_vector};
use super::moments::{Sums, moments, scratch};
use super::{Plan, Weights, hold_weights, inside, place};
use crate::hopper::ptx::rsqrt;
use crate::hopper::ring::barrier_at;
use crate::pointwise::{F32x4, Vec8};
use cubecl::prelude::*;

/// Bytes of a vector of a 16 bit type, which is what the copy engine brings.
const BYTES: u32 = 16;

/// Rows of all tensors in shared memory: those of a line's ring one after the other, of each tensor in turn.
#[derive(CubeType)]
struct Ring<E: Float> {
    tiles: Shared<[Vec8<E>]>,
    /// Barriers: the rows are there.
    full: Shared<[u64]>,
}

/// Vectors of a row in a ring.
fn room(plan: Plan) -> usize {
    plan.vectors * plan.units as usize
}

/// Where the row of tensor `tensor` in place `stage` of this unit's line begins.
#[cube]
fn tile(stage: u32, tensor: u32, #[comptime] tensors: u32, #[comptime] plan: Plan) -> usize {
    let line = UNIT_POS / comptime![plan.units];
    (((line * comptime![plan.ring] + stage) * tensors + tensor) * comptime![room(plan) as u32]) as usize
}

/// Starts to bring row `row` to place `stage`, if there is one. Without a copy engine every unit brings what it will read.
#[cube]
#[allow(clippy::too_many_arguments)]
fn bring<E: Float>(
    ring: &mut Ring<E>,
    x: &[Vec8<E>],
    y_gradient: &[Vec8<E>],
    other: &[Vec8<E>],
    stage: u32,
    row: u32,
    rows: u32,
    width: u32,
    #[comptime] adds: bool,
    #[comptime] plan: Plan,
) {
    let tensors = comptime![if adds { 3u32 } else { 2 }];
    let unit = UNIT_POS % comptime![plan.units];
    let from = (row * width) as usize;
    let to = tile(stage, 0u32, tensors, plan);
    let pitch = comptime![room(plan)];
    if row < rows {
        if comptime![plan.plane > 1] {
            if unit == 0 {
                let long = width as usize;
                let line = UNIT_POS / comptime![plan.units];
                let full = barrier_at(&ring.full, (line * comptime![plan.ring] + stage) as usize);
                full.arrive_and_expect_tx(1, comptime![tensors * BYTES] * width);
                full.memcpy_async_tx(x.slice(from, from + long), ring.tiles.slice_mut(to, to + long));
                let to = to + pitch;
                full.memcpy_async_tx(y_gradient.slice(from, from + long), ring.tiles.slice_mut(to, to + long));
                if comptime![adds] {
                    let to = to + pitch;
                    full.memcpy_async_tx(other.slice(from, from + long), ring.tiles.slice_mut(to, to + long));
                }
            }
        } else {
            #[unroll]
            for v in 0..comptime![plan.vectors] {
                let column = unit + comptime![v as u32 * plan.units];
                if inside(column, width, plan) {
                    let (from, to) = (from + column as usize, to + column as usize);
                    ring.tiles[to] = x[from];
                    ring.tiles[to + pitch] = y_gradient[from];
                    if comptime![adds] {
                        ring.tiles[to + comptime![2 * pitch]] = other[from];
                    }
                }
            }
        }
    }
}

/// This unit's vectors of the row that begins at `from`.
#[cube]
fn take<E: Float>(ring: &Ring<E>, from: usize, to: &mut Array<Vec8<E>>, unit: u32, width: u32, #[comptime] plan: Plan) {
    #[unroll]
    for v in 0..comptime![plan.vectors] {
        let column = unit + comptime![v as u32 * plan.units];
        if inside(column, width, plan) {
            to[v] = ring.tiles[from + column as usize];
        }
    }
}

/// As [`norm_backward`](super::backward::norm_backward), with `plan.ring` rows of each line in shared memory. The lines of a cube
/// take rows `CUBE_COUNT` apart, so that no cube has more than one row more than another.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn norm_backward_streamed<E: Float>(
    x: &[Vec8<E>],
    w: &[Vec8<E>],
    y_gradient: &[Vec8<E>],
    other: &[Vec8<E>],
    x_gradient: &mut [Vec8<E>],
    parts: &mut [F32x4],
    eps: f32,
    inverse: f32,
    rows: u32,
    width: u32,
    #[comptime] centred: bool,
    #[comptime] adds: bool,
    #[comptime] plan: Plan,
) {
    let (units, side, depth) = comptime![(plan.units, plan.side, plan.ring)];
    let tensors = comptime![if adds { 3u32 } else { 2 }];
    // Unpacked numbers stay in registers while the units meet, if there are enough.
    let again = comptime![units * side > 512];
    let tiles = comptime![(depth * side * tensors) as usize * room(plan)];
    let mut ring = Ring::<E> {
        tiles: Shared::<[Vec8<E>]>::new_aligned_slice(tiles, 128usize),
        full: Shared::<[u64]>::new_slice(comptime![(depth * side) as usize]),
    };
    let (line, unit) = (UNIT_POS / units, UNIT_POS % units);
    let stride = CUBE_COUNT_X * side;
    let mut row = line * CUBE_COUNT_X + CUBE_POS_X;
    if comptime![plan.plane > 1] {
        if unit == 0 {
            #[unroll]
            for stage in 0..depth {
                barrier_at(&ring.full, (line * depth + stage) as usize).init_manual(1);
            }
            sync_async_proxy_shared();
        }
    }
    #[unroll]
    for stage in 0..depth {
        bring(&mut ring, x, y_gradient, other, stage, row + stage * stride, rows, width, adds, plan);
    }
    let mut shared = Shared::<[F32x4]>::new_slice(comptime![scratch(plan)]);
    let mut weights = Weights::<E>::new_slice(comptime![plan.room()]);
    hold_weights(w, &mut weights, unit, width, plan);
    let mut w_sums = Array::<f32>::new(comptime![plan.vectors * 8]);
    let mut b_sums = Array::<f32>::new(comptime![plan.vectors * 8]);
    #[unroll]
    for i in 0..comptime![plan.vectors * 8] {
        w_sums[i] = 0.0;
        b_sums[i] = 0.0;
    }
    // The barriers are there for all units.
    sync_cube();
    let mut turn = 0u32;
    let mut stage = 0u32;
    let mut parity = 0u32;
    let mut before = depth.runtime();
    // As many turns for all lines: their units may meet in each.
    let mut first = CUBE_POS_X;
    while first < rows {
        if comptime![plan.plane > 1] {
            if row < rows {
                barrier_at(&ring.full, (line * depth + stage) as usize).wait_parity(parity);
            }
        }
        let at = tile(stage, 0u32, tensors, plan);
        let mut start = 0.0f32;
        let mut values = Array::<Vec8<E>>::new(plan.vectors);
        let mut slopes = Array::<Vec8<E>>::new(plan.vectors);
        take(&ring, at, &mut values, unit, width, plan);
        take(&ring, at + comptime![room(plan)], &mut slopes, unit, width, plan);
        if comptime![centred] {
            if comptime![plan.plane > 1] {
                start = f32::cast_from(ring.tiles[at].extract(0usize));
            } else if row < rows {
                start = f32::cast_from(x[(row * width) as usize].extract(0usize));
            }
        }
        let sums = comptime![Sums { centred, slopes: true }];
        let of_row =
            moments(&values, 0usize, &slopes, &weights, start, &mut shared, turn, unit, width, inverse, sums, plan);
        // All units have met since the row before was read for the last time.
        if before < depth {
            bring(
                &mut ring,
                x,
                y_gradient,
                other,
                before,
                row + comptime![depth - 1] * stride,
                rows,
                width,
                adds,
                plan,
            );
        }
        let factor = rsqrt(of_row.squares * inverse + eps);
        let factors = Factors {
            start,
            factor,
            shift: of_row.mean * factor,
            along: of_row.product * factor * factor * inverse,
            slope_mean: of_row.weighted * inverse * factor,
        };
        #[unroll]
        for v in 0..comptime![plan.vectors] {
            let column = unit + comptime![v as u32 * units];
            if row < rows && inside(column, width, plan) {
                let here = at + column as usize;
                let mut value = values[v];
                let mut slope = slopes[v];
                if comptime![again] {
                    value = ring.tiles[here];
                    slope = ring.tiles[here + comptime![room(plan)]];
                }
                let mut more = value;
                if comptime![adds] {
                    more = ring.tiles[here + comptime![2 * room(plan)]];
                }
                let weight = weights[place(comptime![v], plan)];
                let result = of_vector(
                    value,
                    slope,
                    weight,
                    more,
                    &factors,
                    &mut w_sums,
                    &mut b_sums,
                    comptime![v],
                    centred,
                    adds,
                );
                x_gradient[(row * width + column) as usize] = result;
            }
        }
        before = stage;
        stage += 1;
        if stage == depth {
            stage = 0u32;
            parity = 1 - parity;
        }
        turn = 1 - turn;
        row += stride;
        first += stride;
    }
    let kinds = comptime![if centred { 2u32 } else { 1 }];
    let parts_of_lines = comptime![if side > 1 { plan.left(kinds) as usize * plan.room() / plan.vectors } else { 1 }];
    let mut lines = Shared::<[F32x4]>::new_slice(parts_of_lines);
    let first = CUBE_POS_X * kinds * width * 2;
    leave(&mut w_sums, &mut b_sums, &mut lines, parts, first, unit, width, kinds, plan);
}
