//! The softmax statistics of the backward pass: `delta = Σ out · dout` of each query, and its log-sum-exp in the form
//! that the kernels add to a score.
use cubecl::prelude::*;

/// Four adjacent 16-bit numbers.
type Quad<E> = Vector<E, Const<4>>;

/// Queries of one cube.
pub const ROWS: u32 = 8;

const LOG2_E: f32 = core::f32::consts::LOG2_E;

/// Writes `lse_delta [2, batch, heads, query]`: first `-lse · log₂ e`, then `delta`; both are zero past the last query.
/// A query without a visible key gets 0 instead of infinity, so that the exponential of its masked scores is 0. A plane
/// takes one query; cube `(query block, head, batch)`; strides in units of four elements.
#[cube(launch_unchecked)]
pub fn attention_delta<E: Float>(
    out: &[Quad<E>],
    dout: &[Quad<E>],
    lse: &[f32],
    lse_delta: &mut [f32],
    queries: u32,
    stats_stride: u32,
    out_by_row: u32,
    out_by_batch: u32,
    out_by_head: u32,
    dout_by_row: u32,
    dout_by_batch: u32,
    dout_by_head: u32,
    #[comptime] head_dim: usize,
) {
    let row = CUBE_POS_X * ROWS + UNIT_POS / 32;
    let (head, batch) = (CUBE_POS_Y, CUBE_POS_Z);
    let lane = UNIT_POS % 32;
    let out_at = row * out_by_row + batch * out_by_batch + head * out_by_head;
    let dout_at = row * dout_by_row + batch * dout_by_batch + head * dout_by_head;
    let mut delta = 0.0f32;
    #[unroll]
    for quad in 0..comptime![head_dim.div_ceil(128)] {
        let column = lane + comptime![(quad * 32) as u32];
        if row < queries && column < comptime![(head_dim / 4) as u32] {
            let a = out[(out_at + column) as usize];
            let b = dout[(dout_at + column) as usize];
            #[unroll]
            for i in 0..4usize {
                delta += f32::cast_from(a.extract(i)) * f32::cast_from(b.extract(i));
            }
        }
    }
    delta = plane_sum(delta);
    if lane == 0 {
        let at = (batch * CUBE_COUNT_Y + head) * stats_stride + row;
        let mut neg_lse = 0.0f32;
        if row < queries {
            let lse_of_row = lse[at as usize];
            neg_lse = select(lse_of_row > NO_KEY, -lse_of_row * LOG2_E, 0.0);
        }
        lse_delta[at as usize] = neg_lse;
        lse_delta[(CUBE_COUNT_Z * CUBE_COUNT_Y * stats_stride + at) as usize] = delta;
    }
}

/// A log-sum-exp below this belongs to a query without a visible key.
const NO_KEY: f32 = -1.0e30;
