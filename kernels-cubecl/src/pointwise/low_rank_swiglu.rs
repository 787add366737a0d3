//! `silu(gate) · up` of `[gate | up] = y + x · wᵀ` where a row of `x` is short, as for adapters, and its gradient: the sum is
//! never written. See [`low_rank`](super::low_rank).
use super::low_rank::{COLUMNS, LINES, LowRank, Plan, ROWS, Vec4, left, right};
use super::swiglu::{gate_gradient, gated, sigmoid};
use super::{CubeShape, PointwiseError, Vec8, buffer, cube_max};
use crate::attention::portable::mma::tile::{Acc2, Pair, accumulators, multiply};
use crate::fp8::amax::{greatest, reduce};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Instructions' rows that a plane has in flight.
const AHEAD: usize = 2;

/// What is added to the gate's columns of a plane and to the same of up, for an instruction's rows.
#[cube]
fn added<E: Float>(
    x: &[Vec4<E>],
    row: u32,
    of_w: &Sequence<Array<Pair<E>>>,
    #[comptime] plan: Plan,
) -> Sequence<Array<Acc2>> {
    let short = comptime![4 * plan.steps as u32];
    let mut acc = accumulators(COLUMNS);
    #[unroll]
    for step in 0..plan.steps {
        let at = row * short + UNIT_POS % 4 + comptime![4 * step as u32];
        let operand = left::<E>(x[at as usize], x[(at + 8 * short) as usize]);
        #[unroll]
        for nth in 0..4usize {
            multiply(acc.index_mut(nth), &operand, of_w.index(comptime![4 * step + nth]));
        }
    }
    acc
}

/// Number `i` of eight, with what is added by the accumulators of the upper or lower rows.
#[cube]
fn sum<E: Float>(y: Vec8<E>, acc: &Sequence<Array<Acc2>>, #[comptime] half: usize, #[comptime] i: usize) -> f32 {
    let added = acc.index(comptime![i / 2])[half];
    f32::cast_from(y.extract(i)) + added.extract(comptime![i % 2])
}

/// Cube `(columns, rows)`; with `amax` it writes the greatest magnitude of its numbers.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn low_rank_swiglu_forward<E: Float>(
    y: &[Vec8<E>],
    x: &[Vec4<E>],
    w: &[E],
    out: &mut [Vec8<E>],
    parts: &mut [f32],
    half: u32,
    #[comptime] plan: Plan,
    #[comptime] amax: bool,
) {
    let (line, quarter) = (UNIT_POS % 32 / 4, UNIT_POS % 4);
    let first = (CUBE_POS_X * (CUBE_DIM_X / 32) + UNIT_POS / 32) * comptime![COLUMNS as u32];
    let (width, column) = (half / 8, first / 8 + quarter);
    let of_gate = right::<E>(w, first, half, plan);
    let of_up = right::<E>(w, half + first, half, plan);
    let mut row = CUBE_POS_Y * comptime![ROWS as u32] + line;
    let end = row + comptime![ROWS as u32];
    let mut top = 0.0f32;
    while row < end {
        let mut gates = Array::<Vec8<E>>::new(comptime![2 * AHEAD]);
        let mut ups = Array::<Vec8<E>>::new(comptime![2 * AHEAD]);
        #[unroll]
        for a in 0..comptime![2 * AHEAD] {
            let at = (row + comptime![8 * a as u32]) * 2 * width + column;
            gates[a] = y[at as usize];
            ups[a] = y[(at + width) as usize];
        }
        #[unroll]
        for tile in 0..AHEAD {
            let above = row + comptime![(LINES * tile) as u32];
            let to_gate = added::<E>(x, above, &of_gate, plan);
            let to_up = added::<E>(x, above, &of_up, plan);
            #[unroll]
            for lower in 0..2usize {
                let a = comptime![2 * tile + lower];
                let mut result = Vec8::<E>::empty();
                #[unroll]
                for i in 0..8usize {
                    let gate = sum::<E>(gates[a], &to_gate, lower, i);
                    let up = sum::<E>(ups[a], &to_up, lower, i);
                    result.insert(i, E::cast_from(gated(gate, up)));
                }
                if comptime![amax] {
                    top = greatest::<E>(result, top);
                }
                out[((row + comptime![8 * a as u32]) * width + column) as usize] = result;
            }
        }
        row += comptime![(LINES * AHEAD) as u32];
    }
    if comptime![amax] {
        write_part(top, parts);
    }
}

/// The gradient of `[gate | up]`, as [`low_rank_swiglu_forward`].
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn low_rank_swiglu_backward<E: Float>(
    y: &[Vec8<E>],
    x: &[Vec4<E>],
    w: &[E],
    dout: &[Vec8<E>],
    dy: &mut [Vec8<E>],
    parts: &mut [f32],
    half: u32,
    #[comptime] plan: Plan,
    #[comptime] amax: bool,
) {
    let (line, quarter) = (UNIT_POS % 32 / 4, UNIT_POS % 4);
    let first = (CUBE_POS_X * (CUBE_DIM_X / 32) + UNIT_POS / 32) * comptime![COLUMNS as u32];
    let (width, column) = (half / 8, first / 8 + quarter);
    let of_gate = right::<E>(w, first, half, plan);
    let of_up = right::<E>(w, half + first, half, plan);
    let mut row = CUBE_POS_Y * comptime![ROWS as u32] + line;
    let end = row + comptime![ROWS as u32];
    let mut top = 0.0f32;
    while row < end {
        let mut gates = Array::<Vec8<E>>::new(comptime![2 * AHEAD]);
        let mut ups = Array::<Vec8<E>>::new(comptime![2 * AHEAD]);
        let mut grads = Array::<Vec8<E>>::new(comptime![2 * AHEAD]);
        #[unroll]
        for a in 0..comptime![2 * AHEAD] {
            let row = row + comptime![8 * a as u32];
            let at = row * 2 * width + column;
            gates[a] = y[at as usize];
            ups[a] = y[(at + width) as usize];
            grads[a] = dout[(row * width + column) as usize];
        }
        #[unroll]
        for tile in 0..AHEAD {
            let above = row + comptime![(LINES * tile) as u32];
            let to_gate = added::<E>(x, above, &of_gate, plan);
            let to_up = added::<E>(x, above, &of_up, plan);
            #[unroll]
            for lower in 0..2usize {
                let a = comptime![2 * tile + lower];
                let mut of_gates = Vec8::<E>::empty();
                let mut of_ups = Vec8::<E>::empty();
                #[unroll]
                for i in 0..8usize {
                    let gate = sum::<E>(gates[a], &to_gate, lower, i);
                    let up = sum::<E>(ups[a], &to_up, lower, i);
                    let grad = f32::cast_from(grads[a].extract(i));
                    let s = sigmoid(gate);
                    of_gates.insert(i, E::cast_from(gate_gradient(grad, gate, up, s)));
                    of_ups.insert(i, E::cast_from(grad * gate * s));
                }
                if comptime![amax] {
                    top = greatest::<E>(of_ups, greatest::<E>(of_gates, top));
                }
                let at = (row + comptime![8 * a as u32]) * 2 * width + column;
                dy[at as usize] = of_gates;
                dy[(at + width) as usize] = of_ups;
            }
        }
        row += comptime![(LINES * AHEAD) as u32];
    }
    if comptime![amax] {
        write_part(top, parts);
    }
}

/// The greatest number of the cube's units.
#[cube]
fn write_part(top: f32, parts: &mut [f32]) {
    let mut scratch = Shared::<[f32]>::new_slice(comptime![CubeShape::GPU.scratch()]);
    let top = cube_max(top, &mut scratch, comptime![CubeShape::GPU]);
    if UNIT_POS == 0 {
        parts[(CUBE_POS_Y * CUBE_COUNT_X + CUBE_POS_X) as usize] = top;
    }
}

/// `out [rows, columns] = silu(gate) · up` of `[gate | up] = y + x · wᵀ`, `y [rows, 2 columns]`, `x [rows, inner]`, `w [2
/// columns, inner]`, sums in fp32, of type `E` (2 bytes) and without gaps; and the amax of `out`, `[1]` in fp32.
///
/// # Errors
/// If there is no kernel for these sizes, or a buffer is too small.
pub fn forward<E: Float>(
    client: &Client,
    sizes: LowRank,
    [y, x, w, out]: [&Handle; 4],
    amax: Option<&Handle>,
) -> Result<(), PointwiseError> {
    let Launch { cubes, parts, plan, count } = prepared::<E>(client, sizes)?;
    let LowRank { rows, columns, inner, .. } = sizes;
    let (cube, vectors, bytes) = (CubeShape::GPU, rows * columns / 8, 8 * size_of::<E>());
    let y = buffer("y", y, 2 * vectors, bytes)?;
    let x = buffer("x", x, rows * inner / 4, 4 * size_of::<E>())?;
    let w = buffer("w", w, 2 * columns * inner, size_of::<E>())?;
    let out = buffer("out", out, vectors, bytes)?;
    let (written, half) = (buffer("parts", &parts, count, 4)?, columns as u32);
    // SAFETY: cubes divide columns and rows without a rest, and the buffers hold them.
    unsafe {
        low_rank_swiglu_forward::launch_unchecked::<E>(
            client,
            cubes,
            cube.dim(),
            y,
            x,
            w,
            out,
            written,
            half,
            plan,
            amax.is_some(),
        );
    }
    amax.map_or(Ok(()), |amax| reduce(client, &parts, amax, count))
}

/// The gradient of `[gate | up]` in [`forward`], given `dout`, and its amax.
///
/// # Errors
/// If there is no kernel for these sizes, or a buffer is too small.
pub fn backward<E: Float>(
    client: &Client,
    sizes: LowRank,
    [y, x, w, dout, dy]: [&Handle; 5],
    amax: Option<&Handle>,
) -> Result<(), PointwiseError> {
    let Launch { cubes, parts, plan, count } = prepared::<E>(client, sizes)?;
    let LowRank { rows, columns, inner, .. } = sizes;
    let (cube, vectors, bytes) = (CubeShape::GPU, rows * columns / 8, 8 * size_of::<E>());
    let y = buffer("y", y, 2 * vectors, bytes)?;
    let x = buffer("x", x, rows * inner / 4, 4 * size_of::<E>())?;
    let w = buffer("w", w, 2 * columns * inner, size_of::<E>())?;
    let dout = buffer("out_gradient", dout, vectors, bytes)?;
    let dy = buffer("y_gradient", dy, 2 * vectors, bytes)?;
    let (written, half) = (buffer("parts", &parts, count, 4)?, columns as u32);
    // SAFETY: cubes divide columns and rows without a rest, and the buffers hold them.
    unsafe {
        low_rank_swiglu_backward::launch_unchecked::<E>(
            client,
            cubes,
            cube.dim(),
            y,
            x,
            w,
            dout,
            dy,
            written,
            half,
            plan,
            amax.is_some(),
        );
    }
    amax.map_or(Ok(()), |amax| reduce(client, &parts, amax, count))
}

/// What both launches share.
struct Launch {
    cubes: CubeCount,
    /// A number for each cube.
    parts: Handle,
    plan: Plan,
    count: usize,
}

fn prepared<E: Float>(client: &Client, sizes: LowRank) -> Result<Launch, PointwiseError> {
    let LowRank { rows, columns, inner, transposed } = sizes;
    if !sizes.has_kernel::<E>(client) || !transposed {
        return Err(PointwiseError::Shape { shape: format!("{sizes:?}") });
    }
    let of = [columns / (COLUMNS * CubeShape::GPU.planes()), rows / ROWS];
    let (count, cubes) = (of[0] * of[1], CubeCount::Static(of[0] as u32, of[1] as u32, 1));
    Ok(Launch { cubes, parts: client.empty(4 * count), plan: Plan { steps: inner / 16, transposed }, count })
}
