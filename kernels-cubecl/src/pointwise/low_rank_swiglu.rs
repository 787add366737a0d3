//! `silu(gate) · up` of `[gate | up] = y + x · wᵀ` where a row of `x` is short, as for adapters, and its gradient: the sum is
//! never written. See [`low_rank`](super::low_rank).
use super::gated::{gate_gradient, gated};
use super::low_rank::{COLUMNS, CUBE, LINES, LowRank, Plan, ROWS, Vec4, columns_of, multiplied, plus, rows_of, sum};
use super::sigmoid::sigmoid;
use super::{PointwiseError, Vec8, buffer, cube_max};
use crate::attention::portable::mma::tile::Pair;
use crate::fp8::amax::{greatest, reduce};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Which of the two is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Way {
    /// The gradient of `[gate | up]`, else the activation.
    pub gradient: bool,
    /// Whether the cubes write the greatest magnitudes of their numbers.
    pub amax: bool,
    /// Sixteens of columns of [`Left::x`], 0 without.
    pub left: usize,
    /// Gate and up read columns of `x` of their own: those of the up half lie behind those of the gate.
    pub apart: bool,
}

impl Way {
    /// How [`Left`] is multiplied.
    fn plan_of_left(self) -> Plan {
        Plan { steps: self.left, transposed: false, ahead: 1 }
    }

    /// Sixteens of columns of `x`.
    fn pitch(self, plan: Plan) -> usize {
        if self.apart { 2 * plan.steps } else { plan.steps }
    }

    /// Vectors of shared memory for its columns.
    fn held(self) -> usize {
        (4 * self.left * CUBE.units as usize).max(1)
    }
}

/// A GEMM that is added to the gradient of the activation: `x · w`, `x [rows, inner]` and `w [inner, columns]`.
#[derive(Clone, Copy, Debug)]
pub struct Left<'a> {
    /// As [`LowRank::inner`].
    pub inner: usize,
    /// The rows.
    pub x: &'a Handle,
    /// The columns.
    pub w: &'a Handle,
}

/// Left operands in shared memory, where each unit reads only what it has written: in registers they would cost the SM one
/// of four cubes.
type Held<E> = Shared<[Vec8<E>]>;

/// The place of a unit's instruction `nth`.
#[cube]
fn place(#[comptime] nth: usize) -> usize {
    UNIT_POS as usize + comptime![nth * CUBE.units as usize]
}

#[cube]
fn hold<E: Float>(operands: &Sequence<Array<Pair<E>>>, held: &mut Held<E>, #[comptime] count: usize) {
    #[unroll]
    for nth in 0..count {
        let mut all = Vec8::<E>::empty();
        #[unroll]
        for i in 0..8usize {
            all.insert(i, operands.index(nth)[comptime![i / 2]].extract(comptime![i % 2]));
        }
        held[place(comptime![nth])] = all;
    }
}

#[cube]
fn take<E: Float>(held: &Held<E>, #[comptime] count: usize) -> Sequence<Array<Pair<E>>> {
    let mut operands = Sequence::<Array<Pair<E>>>::new();
    // Otherwise they might be read once, in front of the loop.
    sync_plane();
    #[unroll]
    for nth in 0..count {
        let all = held[place(comptime![nth])];
        let mut registers = Array::<Pair<E>>::new(4usize);
        #[unroll]
        for part in 0..4usize {
            let mut pair = Pair::<E>::empty();
            pair.insert(0usize, all.extract(comptime![2 * part]));
            pair.insert(1usize, all.extract(comptime![2 * part + 1]));
            registers[part] = pair;
        }
        operands.push(registers);
    }
    operands
}

/// Cube `(columns, rows)`. `dout`, and what is added to it, is read for the gradient only.
#[cube(launch_unchecked)]
pub fn low_rank_swiglu<E: Float>(
    y: &[Vec8<E>],
    x: &[Vec4<E>],
    w: &[Vec4<E>],
    dout: &[Vec8<E>],
    left_x: &[Vec4<E>],
    left_w: &[Vec4<E>],
    result: &mut [Vec8<E>],
    parts: &mut [f32],
    half: u32,
    #[comptime] plan: Plan,
    #[comptime] way: Way,
) {
    let first = (CUBE_POS_X * comptime![CUBE.planes() as u32] + UNIT_POS / 32) * comptime![COLUMNS as u32];
    let (width, column) = (half / 8, first / 8 + UNIT_POS % 32 / 4);
    let of_gate = columns_of::<E>(w, first, half, plan);
    let of_up = columns_of::<E>(w, half + first, half, plan);
    let mut of_left = Held::<E>::new_slice(comptime![way.held()]);
    if comptime![way.left > 0] {
        let columns = columns_of::<E>(left_w, first, half, comptime![way.plan_of_left()]);
        hold::<E>(&columns, &mut of_left, comptime![4 * way.left]);
    }
    let mut row = CUBE_POS_Y * comptime![ROWS as u32];
    let end = row + comptime![ROWS as u32];
    let mut top = 0.0f32;
    while row < end {
        let own = row + UNIT_POS % 4 * 2;
        let mut gates = Array::<Vec8<E>>::new(comptime![2 * plan.ahead]);
        let mut ups = Array::<Vec8<E>>::new(comptime![2 * plan.ahead]);
        let mut grads = Array::<Vec8<E>>::new(comptime![2 * plan.ahead]);
        #[unroll]
        for i in 0..comptime![2 * plan.ahead] {
            let row = own + comptime![(i / 2 * LINES + i % 2) as u32];
            let at = row * 2 * width + column;
            gates[i] = y[at as usize];
            ups[i] = y[(at + width) as usize];
            if comptime![way.gradient] {
                grads[i] = dout[(row * width + column) as usize];
            }
        }
        let of_x = rows_of::<E>(x, row, plan, 0usize, comptime![way.pitch(plan)]);
        let of_up_x = rows_of::<E>(x, row, plan, comptime![way.pitch(plan) - plan.steps], comptime![way.pitch(plan)]);
        let of_left_x = rows_of::<E>(left_x, row, comptime![way.plan_of_left()], 0usize, comptime![way.left]);
        #[unroll]
        for a in 0..plan.ahead {
            if comptime![way.left > 0] {
                let columns = take::<E>(&of_left, comptime![4 * way.left]);
                let to_grad = multiplied::<E>(&columns, &of_left_x, a, comptime![way.plan_of_left()]);
                #[unroll]
                for of in 0..2usize {
                    let nth = comptime![2 * a + of];
                    grads[nth] = sum::<E>(grads[nth], &to_grad, of);
                }
            }
            let to_gate = multiplied::<E>(&of_gate, &of_x, a, plan);
            let to_up = multiplied::<E>(&of_up, &of_up_x, a, plan);
            #[unroll]
            for of in 0..2usize {
                let nth = comptime![2 * a + of];
                let row = own + comptime![(a * LINES + of) as u32];
                let mut of_gates = Vec8::<E>::empty();
                let mut of_ups = Vec8::<E>::empty();
                #[unroll]
                for i in 0..8usize {
                    let gate = plus::<E>(gates[nth], &to_gate, of, i);
                    let up = plus::<E>(ups[nth], &to_up, of, i);
                    if comptime![way.gradient] {
                        let (grad, s) = (f32::cast_from(grads[nth].extract(i)), sigmoid(gate));
                        of_gates.insert(i, E::cast_from(gate_gradient(grad, gate, up, s)));
                        of_ups.insert(i, E::cast_from(grad * gate * s));
                    } else {
                        of_gates.insert(i, E::cast_from(gated(gate, up)));
                    }
                }
                if comptime![way.amax] {
                    top = greatest::<E>(of_gates, top);
                }
                if comptime![way.gradient] {
                    if comptime![way.amax] {
                        top = greatest::<E>(of_ups, top);
                    }
                    let at = row * 2 * width + column;
                    result[at as usize] = of_gates;
                    result[(at + width) as usize] = of_ups;
                } else {
                    result[(row * width + column) as usize] = of_gates;
                }
            }
        }
        row += comptime![(LINES * plan.ahead) as u32];
    }
    if comptime![way.amax] {
        let mut scratch = Shared::<[f32]>::new_slice(comptime![CUBE.scratch()]);
        let top = cube_max(top, &mut scratch, CUBE);
        if UNIT_POS == 0 {
            parts[(CUBE_POS_Y * CUBE_COUNT_X + CUBE_POS_X) as usize] = top;
        }
    }
}

/// Sizes of `y [rows, 2 half] = [gate | up]`, `w [2 half, inner]` and `x [rows, inner]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GateAndUp {
    /// Rows of `x` and `y`.
    pub rows: usize,
    /// Columns of the gate.
    pub half: usize,
    /// Columns of `w`.
    pub inner: usize,
    /// `x` is `[rows, 2 inner]`, of which the gate reads the first half and up the other.
    pub apart: bool,
}

impl GateAndUp {
    /// Whether there is a kernel, as [`LowRank::has_kernel`], for the halves.
    pub fn has_kernel<E: Float>(&self, client: &Client) -> bool {
        self.of_half(self.inner, true).has_kernel::<E>(client)
    }

    fn of_half(&self, inner: usize, transposed: bool) -> LowRank {
        LowRank { rows: self.rows, columns: self.half, inner, transposed }
    }
}

/// `out [rows, half] = silu(gate) · up` of `[gate | up] = y + x · wᵀ`, sums in fp32, of type `E` (2 bytes) and without gaps;
/// and the amax of `out`, `[1]` in fp32.
///
/// # Errors
/// If there is no kernel for these sizes, or a buffer is too small.
pub fn forward<E: Float>(
    client: &Client,
    sizes: GateAndUp,
    [y, x, w, out]: [&Handle; 4],
    amax: Option<&Handle>,
) -> Result<(), PointwiseError> {
    launch::<E>(client, sizes, [y, x, w, out, out], None, amax, false)
}

/// The gradient of `[gate | up]` in [`forward`], given `dout` to which `left` is added, and its amax.
///
/// # Errors
/// If there is no kernel for these sizes, or a buffer is too small.
pub fn backward<E: Float>(
    client: &Client,
    sizes: GateAndUp,
    tensors: [&Handle; 5],
    left: Option<Left>,
    amax: Option<&Handle>,
) -> Result<(), PointwiseError> {
    launch::<E>(client, sizes, tensors, left, amax, true)
}

fn launch<E: Float>(
    client: &Client,
    sizes: GateAndUp,
    [y, x, w, dout, result]: [&Handle; 5],
    left: Option<Left>,
    amax: Option<&Handle>,
    gradient: bool,
) -> Result<(), PointwiseError> {
    let GateAndUp { rows, half, inner, apart } = sizes;
    if !sizes.has_kernel::<E>(client) {
        return Err(PointwiseError::Shape { shape: format!("{sizes:?}") });
    }
    let of_left = left.map(|left| sizes.of_half(left.inner, false));
    if let Some(refused) = of_left.filter(|of_left| !of_left.has_kernel::<E>(client)) {
        return Err(PointwiseError::Shape { shape: format!("{refused:?}") });
    }
    let (cubes, count, plan) = sizes.of_half(inner, true).launch(1);
    let way = Way { gradient, amax: amax.is_some(), left: left.map_or(0, |left| left.inner / 16), apart };
    let (vectors, bytes) = (rows * half / 8, 8 * size_of::<E>());
    let parts = client.empty(4 * count);
    let y = buffer("y", y, 2 * vectors, bytes)?;
    let (left_x, left_w) = left.map_or((x, w), |left| (left.x, left.w));
    let inner_of_left = left.map_or(inner, |left| left.inner);
    let left_x = buffer("left x", left_x, rows * inner_of_left / 4, 4 * size_of::<E>())?;
    let left_w = buffer("left w", left_w, half * inner_of_left / 4, 4 * size_of::<E>())?;
    let x = buffer("x", x, rows * 4 * way.pitch(plan), 4 * size_of::<E>())?;
    let w = buffer("w", w, 2 * half * inner / 4, 4 * size_of::<E>())?;
    let dout = buffer("out_gradient", dout, vectors, bytes)?;
    let result = buffer("result", result, if gradient { 2 * vectors } else { vectors }, bytes)?;
    let written = buffer("parts", &parts, count, 4)?;
    // SAFETY: cubes divide columns and rows without a rest, and the buffers hold them; `dout` is another tensor than
    // the result where it is read.
    unsafe {
        launch_kernel!(low_rank_swiglu<E>, client, cubes, CUBE.dim();
            y, x, w, dout, left_x, left_w, result, written; half as u32; plan, way);
    }
    amax.map_or(Ok(()), |amax| reduce(client, &parts, amax, count))
}
