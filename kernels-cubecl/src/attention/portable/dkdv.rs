//! dK and dV: a unit has one key of one key head and loops over all queries that see it, head by head, so that every
//! sum has a fixed order.
use super::dropout::{self, DropoutParams};
use super::mask::{self, Plan, Sizes};
use super::{exp, row};
use cubecl::prelude::*;

/// `dv = Σ keep p dout` and `dk = scale Σ ds q` over the queries of all heads of the group, with `p`, `ds` and `keep`
/// as in [`dq`](super::dq). Cube `(kv block, key head, batch)`.
#[cube(launch_unchecked)]
pub fn portable_dkdv<E: Float, A: Float>(
    q: &Tensor<E>,
    k: &Tensor<E>,
    v: &Tensor<E>,
    dout: &Tensor<E>,
    lse: &[A],
    delta: &[A],
    dk: &mut Tensor<E>,
    dv: &mut Tensor<E>,
    query_starts: &[i32],
    key_starts: &[i32],
    sizes: &Sizes,
    dropout: &DropoutParams,
    scale: InputScalar,
    #[comptime] plan: Plan,
) {
    let key = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    let (kv_head, batch) = (CUBE_POS_Y, CUBE_POS_Z);
    if key < sizes.keys {
        let scale = scale.get::<A>();
        let mut key_row = Array::<A>::new(plan.head_dim);
        row::read(k, row::at(k, key, batch, kv_head), &mut key_row, plan.head_dim);
        let mut value_row = Array::<A>::new(plan.value_dim);
        row::read(v, row::at(v, key, batch, kv_head), &mut value_row, plan.value_dim);
        let mut acc_dk = Array::<A>::new(plan.head_dim);
        row::fill(&mut acc_dk, plan.head_dim);
        let mut acc_dv = Array::<A>::new(plan.value_dim);
        row::fill(&mut acc_dv, plan.value_dim);
        let queries = mask::visible_queries(key, query_starts, key_starts, sizes, plan);
        for nth in 0..sizes.group {
            let head = kv_head * sizes.group + nth;
            let statistics = (batch * CUBE_COUNT_Y * sizes.group + head) * sizes.statistics;
            for query in queries.first..queries.end {
                let stats_index = (statistics + query) as usize;
                let (query_at, dout_at) = (row::at(q, query, batch, head), row::at(dout, query, batch, head));
                let score = row::dot(q, query_at, &key_row, plan.head_dim) * scale;
                let p = exp::exp::<A>(score - lse[stats_index]);
                let mut dp = row::dot(dout, dout_at, &value_row, plan.value_dim);
                let mut kept = p;
                if comptime![plan.dropout] {
                    let row_keys = dropout::row_keys(dropout, batch, head, query);
                    let keep = A::cast_from(dropout::keep_factor(dropout, &row_keys, key));
                    dp *= keep;
                    kept = p * keep;
                }
                row::add(&mut acc_dv, dout, dout_at, kept, plan.value_dim);
                row::add(&mut acc_dk, q, query_at, p * (dp - delta[stats_index]), plan.head_dim);
            }
        }
        row::scale(&mut acc_dk, scale, plan.head_dim);
        row::write(dk, key, batch, kv_head, &acc_dk, plan.head_dim);
        row::write(dv, key, batch, kv_head, &acc_dv, plan.value_dim);
    }
}
