//! The row sums that the backward kernels subtract: `delta = Σ out · out_gradient`.
use cubecl::prelude::*;
use half::bf16;

/// Four adjacent bf16 numbers.
type Quad = Vector<bf16, Const<4>>;

/// Rows of one cube.
pub const ROWS: u32 = 8;

/// Writes `delta[batch, head, row]`, zero past the last query. A plane takes one row; cube `(row block, head, batch)`;
/// strides in units of four elements.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn delta(
    out: &[Quad],
    out_gradient: &[Quad],
    delta: &mut [f32],
    queries: u32,
    statistics_stride: u32,
    out_by_row: u32,
    out_by_batch: u32,
    out_by_head: u32,
    gradient_by_row: u32,
    gradient_by_batch: u32,
    gradient_by_head: u32,
    #[comptime] head_dim: usize,
) {
    let row = CUBE_POS_X * ROWS + UNIT_POS / 32;
    let (head, batch) = (CUBE_POS_Y, CUBE_POS_Z);
    let lane = UNIT_POS % 32;
    let mut sum = 0.0f32;
    if row < queries && lane < comptime![(head_dim / 4) as u32] {
        let a = out[(row * out_by_row + batch * out_by_batch + head * out_by_head + lane) as usize];
        let b =
            out_gradient[(row * gradient_by_row + batch * gradient_by_batch + head * gradient_by_head + lane) as usize];
        #[unroll]
        for i in 0..4usize {
            sum += f32::cast_from(a.extract(i)) * f32::cast_from(b.extract(i));
        }
    }
    sum = plane_sum(sum);
    if lane == 0 {
        delta[((batch * CUBE_COUNT_Y + head) * statistics_stride + row) as usize] = sum;
    }
}
