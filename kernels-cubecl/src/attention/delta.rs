//! What the backward kernels need of each row besides the tensors: `delta = Σ out · out_gradient`, and the log-sum-exp
//! in the form that they add to a score.
use cubecl::prelude::*;

/// Four adjacent 16-bit numbers.
type Quad<E> = Vector<E, Const<4>>;

/// Rows of one cube.
pub const ROWS: u32 = 8;

const LOG2_E: f32 = core::f32::consts::LOG2_E;

/// Writes `sums [2, batch, heads, row]`: first `-lse log₂ e`, zero for a row that saw no key (so that its hidden scores
/// have no probability), then `delta`; both zero past the last query. A plane takes one row; cube `(row block, head,
/// batch)`; strides in units of four elements.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn delta<E: Float>(
    out: &[Quad<E>],
    out_gradient: &[Quad<E>],
    lse: &[f32],
    sums: &mut [f32],
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
    let out_at = row * out_by_row + batch * out_by_batch + head * out_by_head;
    let gradient_at = row * gradient_by_row + batch * gradient_by_batch + head * gradient_by_head;
    let mut sum = 0.0f32;
    #[unroll]
    for quad in 0..comptime![head_dim.div_ceil(128)] {
        let column = lane + comptime![(quad * 32) as u32];
        if row < queries && column < comptime![(head_dim / 4) as u32] {
            let a = out[(out_at + column) as usize];
            let b = out_gradient[(gradient_at + column) as usize];
            #[unroll]
            for i in 0..4usize {
                sum += f32::cast_from(a.extract(i)) * f32::cast_from(b.extract(i));
            }
        }
    }
    sum = plane_sum(sum);
    if lane == 0 {
        let at = (batch * CUBE_COUNT_Y + head) * statistics_stride + row;
        let mut shift = 0.0f32;
        if row < queries {
            let logarithm = lse[at as usize];
            shift = select(logarithm > UNSEEN, -logarithm * LOG2_E, 0.0);
        }
        sums[at as usize] = shift;
        sums[(CUBE_COUNT_Z * CUBE_COUNT_Y * statistics_stride + at) as usize] = sum;
    }
}

/// A log-sum-exp below this belongs to a row that saw no key.
const UNSEEN: f32 = -1.0e30;
