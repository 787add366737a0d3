//! The gradients of a normalisation, whose rows the copy engine brings to a ring in shared memory: what is on its way needs no
//! registers, and a cube has rows enough on their way to keep the memory busy while its units meet.
use super::backward::{Factors, change, leave, rounded};
use super::moments::{Sums, scratch, together};
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

/// Whether numbers are bf16.
#[allow(clippy::extra_unused_type_parameters, reason = "what the intrinsic asks for is not seen")]
#[cube]
fn is_bf16<E: Float>() -> comptime_type!(bool) {
    intrinsic!(|scope| E::__expand_as_type(scope) == half::bf16::__expand_as_type(scope))
}

/// A vector's numbers. Those of bf16 are the upper halves of fp32: in half of them that is an instruction less than a cast, whose
/// argument must be moved to the lower half first.
#[cube]
fn unpack<E: Float>(from: Vec8<E>, to: &mut Array<f32>, #[comptime] first: usize) {
    let halves = is_bf16::<E>();
    if comptime![halves] {
        let words = Vector::<u32, Const<4>>::reinterpret(from);
        #[unroll]
        for i in 0..4usize {
            let word = words.extract(i);
            to[comptime![first + 2 * i]] = f32::reinterpret(word << 16);
            to[comptime![first + 2 * i + 1]] = f32::reinterpret(word & 0xffff_0000);
        }
    } else {
        #[unroll]
        for i in 0..8usize {
            to[comptime![first + i]] = f32::cast_from(from.extract(i));
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
    let numbers = comptime![plan.vectors * 8];
    let mut shared = Shared::<[F32x4]>::new_slice(comptime![scratch(plan)]);
    let mut kept = Weights::<E>::new_slice(comptime![if again { plan.room() } else { 1 }]);
    let mut weights = Array::<f32>::new(numbers);
    if comptime![again] {
        hold_weights(w, &mut kept, unit, width, plan);
    } else {
        #[unroll]
        for v in 0..comptime![plan.vectors] {
            let column = unit + comptime![v as u32 * units];
            if inside(column, width, plan) {
                unpack(w[column as usize], &mut weights, comptime![v * 8]);
            }
        }
    }
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
            // Units of a plane may leave the wait one by one, and add up together next.
            sync_plane();
        }
        let at = tile(stage, 0u32, tensors, plan);
        let mut start = 0.0f32;
        if comptime![centred] {
            if comptime![plan.plane > 1] {
                start = f32::cast_from(ring.tiles[at].extract(0usize));
            } else if row < rows {
                start = f32::cast_from(x[(row * width) as usize].extract(0usize));
            }
        }
        let mut values = Array::<f32>::new(numbers);
        let mut slopes = Array::<f32>::new(numbers);
        let mut sum = 0.0f32;
        let mut squares = 0.0f32;
        let mut weighted = 0.0f32;
        let mut product = 0.0f32;
        #[unroll]
        for v in 0..comptime![plan.vectors] {
            let column = unit + comptime![v as u32 * units];
            if inside(column, width, plan) {
                let here = at + column as usize;
                unpack(ring.tiles[here], &mut values, comptime![v * 8]);
                unpack(ring.tiles[here + comptime![room(plan)]], &mut slopes, comptime![v * 8]);
                if comptime![again] {
                    unpack(kept[place(comptime![v], plan)], &mut weights, comptime![v * 8]);
                }
                #[unroll]
                for i in 0..8usize {
                    let k = comptime![v * 8 + i];
                    let away = values[k] - start;
                    let both = slopes[k] * weights[k];
                    squares += away * away;
                    product += away * both;
                    if comptime![centred] {
                        sum += away;
                        weighted += both;
                    }
                }
            }
        }
        let sums = comptime![Sums { centred, slopes: true }];
        let of_row = together(sum, squares, weighted, product, &mut shared, turn, unit, inverse, sums, plan);
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
                if comptime![again] {
                    unpack(ring.tiles[here], &mut values, comptime![v * 8]);
                    unpack(ring.tiles[here + comptime![room(plan)]], &mut slopes, comptime![v * 8]);
                    unpack(kept[place(comptime![v], plan)], &mut weights, comptime![v * 8]);
                }
                let mut others = Array::<f32>::new(8usize);
                if comptime![adds] {
                    unpack(ring.tiles[here + comptime![2 * room(plan)]], &mut others, 0usize);
                }
                let mut result = Vec8::<E>::empty();
                #[unroll]
                for i in 0..8usize {
                    let k = comptime![v * 8 + i];
                    let normal = (values[k] - start) * factors.factor - factors.shift;
                    let slope = slopes[k];
                    w_sums[k] = w_sums[k] + slope * normal;
                    if comptime![centred] {
                        b_sums[k] = b_sums[k] + slope;
                    }
                    let own = change(normal, slope * weights[k], &factors, centred);
                    result.insert(i, rounded::<E>(own, others[i], adds));
                }
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
