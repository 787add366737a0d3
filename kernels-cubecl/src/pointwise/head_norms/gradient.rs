//! The gradients of the norms of query and key heads.
use super::{HeadsShape, Line, line_total};
use crate::hopper::ptx::rsqrt;
use crate::pointwise::{CubeShape, F32x4, PointwiseError, Vec8, buffer};
use crate::pointwise::{norm::backward::half, norm::multiplier, partial_sums::sum_partials};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Cubes of the backward pass per SM, as many as fit: they are persistent, and their partial sums have to be added up.
/// With 72 registers three cubes of 256 units fit; a fourth meant a second round and 2.72 TB/s on an H200.
const CUBES: u32 = 3;
/// Heads of a unit in flight in the backward pass.
const RING: usize = 2;
/// SMs of a device that does not report them.
const DEFAULT_SMS: u32 = 2;

/// Loads a unit's vectors of a head and of its gradient, to place `slot`. Past the last head it is read again: the
/// units of a plane add up together.
#[cube]
fn read_head<E: Float>(
    x: &[Vec8<E>],
    y_gradient: &[Vec8<E>],
    values: &mut Array<Vec8<E>>,
    dys: &mut Array<Vec8<E>>,
    #[comptime] slot: usize,
    row: u32,
    rows: u32,
    #[comptime] line: Line,
) {
    let first = min(row, rows - 1) * comptime![line.units * line.vectors] + UNIT_POS % line.units;
    #[unroll]
    for v in 0..comptime![line.vectors] {
        let (to, place) = (comptime![slot * line.vectors as usize + v as usize], first + comptime![v * line.units]);
        values[to] = x[place as usize];
        dys[to] = y_gradient[place as usize];
    }
}

/// A cube takes `side` heads at a time, every n-th, and writes its partial sums of the gradients of `q`, followed by
/// those of `k`, to a row of `partials`. A unit that takes several heads has the same one of each token, so one weight
/// and one sum are enough. The heads are a ring: a place is filled again as soon as it was used.
#[cube(launch_unchecked)]
pub fn norm_heads_gradients<E: Float>(
    x: &[Vec8<E>],
    q: &[Vec8<E>],
    k: &[Vec8<E>],
    y_gradient: &[Vec8<E>],
    x_gradient: &mut [Vec8<E>],
    partials: &mut [F32x4],
    eps: f32,
    inverse: f32,
    rows: u32,
    heads: u32,
    normed: u32,
    all_heads: u32,
    #[comptime] plus_one: bool,
    #[comptime] line: Line,
    #[comptime] ring: usize,
) {
    let (units, vectors, all) = comptime![(line.units, line.vectors, line.all())];
    let unit = UNIT_POS % units;
    let stride = CUBE_COUNT_X * comptime![line.side];
    let mut first_row = CUBE_POS_X * comptime![line.side];
    let mut row = first_row + UNIT_POS / units;
    let head = min(row, rows - 1) % all_heads;
    let mut values = Array::<Vec8<E>>::new(comptime![ring * vectors as usize]);
    let mut dys = Array::<Vec8<E>>::new(comptime![ring * vectors as usize]);
    #[unroll]
    for slot in 0..ring {
        read_head(x, y_gradient, &mut values, &mut dys, slot, row + comptime![slot as u32] * stride, rows, line);
    }
    let mut weights = Array::<Vec8<E>>::new(comptime![vectors as usize]);
    #[unroll]
    for v in 0..vectors {
        let column = (unit + comptime![v * units]) as usize;
        let mut weight = q[column];
        if head >= heads {
            weight = k[column];
        }
        weights[comptime![v as usize]] = weight;
    }
    let mut sums = Array::<f32>::new(comptime![vectors as usize * 8]);
    #[unroll]
    for i in 0..comptime![vectors as usize * 8] {
        sums[i] = 0.0;
    }
    // Equally many iterations for all heads of the cube: their units are in one plane.
    while first_row < rows {
        #[unroll]
        for slot in 0..ring {
            let own = row + comptime![slot as u32] * stride;
            let mut squares = 0.0f32;
            let mut dot = 0.0f32;
            #[unroll]
            for v in 0..comptime![vectors as usize] {
                let at = comptime![slot * vectors as usize + v];
                let (value, dy, weight) = (values[at], dys[at], weights[v]);
                #[unroll]
                for i in 0..8usize {
                    let number = f32::cast_from(value.extract(i));
                    squares += number * number;
                    dot += number * (f32::cast_from(dy.extract(i)) * multiplier::<E>(weight.extract(i), plus_one));
                }
            }
            let factor = rsqrt(line_total(squares, line) * inverse + eps);
            let along = line_total(dot, line) * factor * factor * inverse;
            if own < rows {
                let first = own * comptime![units * vectors] + unit;
                #[unroll]
                for v in 0..comptime![vectors as usize] {
                    let at = comptime![slot * vectors as usize + v];
                    let (value, dy, weight) = (values[at], dys[at], weights[v]);
                    let mut result = dy;
                    if head < normed {
                        #[unroll]
                        for i in 0..8usize {
                            let c = comptime![v * 8 + i];
                            let normal = f32::cast_from(value.extract(i)) * factor;
                            let dy = f32::cast_from(dy.extract(i));
                            let weighted = dy * multiplier::<E>(weight.extract(i), plus_one);
                            result.insert(i, E::cast_from(weighted * factor - normal * along));
                            sums[c] = sums[c] + dy * normal;
                        }
                    }
                    x_gradient[(first + comptime![v as u32 * units]) as usize] = result;
                }
            }
            let next = own + comptime![ring as u32] * stride;
            read_head(x, y_gradient, &mut values, &mut dys, slot, next, rows, line);
        }
        row += comptime![ring as u32] * stride;
        first_row += comptime![ring as u32] * stride;
    }
    let mut lines = Shared::<[F32x4]>::new_slice(comptime![(4 * vectors * all) as usize]);
    #[unroll]
    for h in 0..comptime![2 * vectors] {
        let place = (UNIT_POS + comptime![h * all]) as usize;
        let own = half(&mut sums, comptime![h as usize * 4]);
        let mut of_queries = F32x4::new(0.0);
        let mut of_keys = F32x4::new(0.0);
        if head < heads {
            of_queries = own;
        } else {
            of_keys = own;
        }
        lines[place] = of_queries;
        lines[place + comptime![(2 * vectors * all) as usize]] = of_keys;
    }
    sync_cube();
    let mut task = UNIT_POS;
    while task < comptime![4 * vectors * units] {
        let (h, unit) = (task / units, task % units);
        let mut total = lines[(h * all + unit) as usize];
        #[unroll]
        for other in 1..comptime![line.side] {
            total += lines[(h * all + unit + comptime![other * units]) as usize];
        }
        let (kind, vector) = (h / comptime![2 * vectors], h % comptime![2 * vectors] / 2);
        let place = (CUBE_POS_X * 2 + kind) * comptime![2 * vectors * units] + (unit + vector * units) * 2 + h % 2;
        partials[place as usize] = total;
        task += all;
    }
}

/// Cubes of the backward pass, about `wanted`: a number with which a cube's next heads are the same ones of later
/// tokens.
fn cubes(wanted: u32, line: Line, shape: HeadsShape) -> u32 {
    let all_heads = shape.all_heads as u32;
    let shared = (1..=line.side).rev().find(|by| all_heads.is_multiple_of(*by) && line.side.is_multiple_of(*by));
    let period = all_heads / shared.unwrap_or(1);
    // With fewer cubes than that, none has a second iteration.
    (wanted / period * period).max(period).min((shape.rows() as u32).div_ceil(line.side))
}

/// The gradients of `x` (type `E`, to `x_gradient`) and of both weights (fp32 `[2, head_dim]`, to `weight_gradients`)
/// in [`forward`](super::forward), given that of `y`. Deterministic.
pub fn backward<E: Float>(
    client: &Client,
    x: &Handle,
    [q, k]: [&Handle; 2],
    y_gradient: &Handle,
    [x_gradient, weight_gradients]: [&Handle; 2],
    (eps, plus_one): (f32, bool),
    shape: HeadsShape,
) -> Result<(), PointwiseError> {
    shape.check()?;
    let (rows, width, vector) = (shape.rows(), shape.head_dim / 8, 8 * size_of::<E>());
    let line = Line::of(CubeShape::of(client), shape.head_dim);
    let sms = client.properties().hardware.num_streaming_multiprocessors.unwrap_or(DEFAULT_SMS);
    let count = cubes(CUBES * sms, line, shape);
    let (shares, sums) = (count as usize, 2 * shape.head_dim);
    let partials = client.empty(4 * shares * sums);
    let (x, y_gradient) =
        (buffer("x", x, rows * width, vector)?, buffer("y_gradient", y_gradient, rows * width, vector)?);
    let (q, k) = (buffer("the queries' weight", q, width, vector)?, buffer("the keys' weight", k, width, vector)?);
    let x_gradient = buffer("x_gradient", x_gradient, rows * width, vector)?;
    let written = buffer("parts", &partials, shares * sums / 4, 16)?;
    buffer("weight_gradients", weight_gradients, sums, 4)?;
    // SAFETY: every unit stays in its heads and its row of partial sums, and the buffers hold all heads.
    unsafe {
        launch_kernel!(norm_heads_gradients<E>, client, CubeCount::Static(count, 1, 1), CubeDim::new_1d(line.all());
            x, q, k, y_gradient, x_gradient, written;
            eps, 1.0 / shape.head_dim as f32, rows as u32, shape.heads as u32, (shape.heads + shape.kv_heads) as u32,
            shape.all_heads as u32; plus_one, line, RING)
    };
    sum_partials(client, &partials, weight_gradients, shares, sums)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_stays_with_its_head() {
        for (tokens, all_heads, head_dim) in
            [(8192, 40, 128), (8192, 48, 64), (301, 37, 128), (7, 3, 8), (9000, 1009, 256)]
        {
            for cube in [CubeShape::GPU, CubeShape::CPU] {
                let shape = HeadsShape { tokens, heads: 1, kv_heads: 1, all_heads, head_dim };
                let line = Line::of(cube, head_dim);
                let count = cubes(528, line, shape);
                let iterations = shape.rows().div_ceil((count * line.side) as usize);
                assert!(
                    iterations == 1 || ((count * line.side) as usize).is_multiple_of(all_heads),
                    "{shape:?}: {count}"
                );
                assert!(count <= 528 || count as usize <= all_heads, "{shape:?}: {count}");
            }
        }
    }
}
