//! dQ: a unit has one query of one head and loops over all keys that it sees.
use super::dropout::{self, DropoutParams};
use super::mask::{self, Plan, Sizes};
use super::{exp, row};
use cubecl::prelude::*;

/// `dq = scale Σ ds k`, with `p = exp(q k · scale - lse)`, `keep` the factor of dropout, `ds = p (keep · dout v -
/// delta)` and `delta = Σ dout out`, which is also written for the dK/dV kernel. Cube `(q block, head, batch)`.
#[cube(launch_unchecked)]
pub fn portable_dq<E: Float, A: Float>(
    q: &Tensor<E>,
    k: &Tensor<E>,
    v: &Tensor<E>,
    out: &Tensor<E>,
    dout: &Tensor<E>,
    lse: &[A],
    delta: &mut [A],
    dq: &mut Tensor<E>,
    query_starts: &[i32],
    key_starts: &[i32],
    sizes: &Sizes,
    dropout: &DropoutParams,
    scale: InputScalar,
    #[comptime] plan: Plan,
) {
    let query = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    let (head, batch) = (CUBE_POS_Y, CUBE_POS_Z);
    if query < sizes.queries {
        let kv_head = head / sizes.group;
        let scale = scale.get::<A>();
        let mut query_row = Array::<A>::new(plan.head_dim);
        row::read(q, row::at(q, query, batch, head), &mut query_row, plan.head_dim);
        let mut dout_row = Array::<A>::new(plan.value_dim);
        row::read(dout, row::at(dout, query, batch, head), &mut dout_row, plan.value_dim);
        let stats_index = ((batch * CUBE_COUNT_Y + head) * sizes.statistics + query) as usize;
        let row_delta = row::dot(out, row::at(out, query, batch, head), &dout_row, plan.value_dim);
        delta[stats_index] = row_delta;
        let row_lse = lse[stats_index];
        let row_keys = dropout::row_keys(dropout, batch, head, query);
        let keys = mask::visible_keys(query, query_starts, key_starts, sizes, plan);
        let mut sum = Array::<A>::new(plan.head_dim);
        row::fill(&mut sum, plan.head_dim);
        for key in keys.first..keys.end {
            let key_at = row::at(k, key, batch, kv_head);
            let p = exp::exp::<A>(row::dot(k, key_at, &query_row, plan.head_dim) * scale - row_lse);
            let mut dp = row::dot(v, row::at(v, key, batch, kv_head), &dout_row, plan.value_dim);
            if comptime![plan.dropout] {
                dp *= A::cast_from(dropout::keep_factor(dropout, &row_keys, key));
            }
            row::add(&mut sum, k, key_at, p * (dp - row_delta), plan.head_dim);
        }
        row::scale(&mut sum, scale, plan.head_dim);
        row::write(dq, query, batch, head, &sum, plan.head_dim);
    }
}
