//! The forward kernel: a unit has one query of one head and loops over all keys that it sees.
use super::dropout::{self, DropoutParams};
use super::mask::{self, Plan, Sizes};
use super::{exp, row};
use cubecl::prelude::*;

/// `out = softmax(q kᵀ · scale) v` and the log-sum-exp of the scaled scores; zero and -∞ for a query without a visible
/// key. Cube `(q block, head, batch)`.
#[cube(launch_unchecked)]
pub fn portable_forward<E: Float, A: Float>(
    q: &Tensor<E>,
    k: &Tensor<E>,
    v: &Tensor<E>,
    out: &mut Tensor<E>,
    lse: &mut [A],
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
        let mut sum = Array::<A>::new(plan.value_dim);
        row::fill(&mut sum, plan.value_dim);
        let row_keys = dropout::row_keys(dropout, batch, head, query);
        let keys = mask::visible_keys(query, query_starts, key_starts, sizes, plan);
        let mut row_max = A::new(-1.0e30);
        let mut row_sum = A::new(0.0);
        for key in keys.first..keys.end {
            let score = row::dot(k, row::at(k, key, batch, kv_head), &query_row, plan.head_dim) * scale;
            if score > row_max {
                let factor = exp::exp::<A>(row_max - score);
                row_sum *= factor;
                row::scale(&mut sum, factor, plan.value_dim);
                row_max = score;
            }
            let p = exp::exp::<A>(score - row_max);
            row_sum += p;
            let mut kept = p;
            if comptime![plan.dropout] {
                kept = p * A::cast_from(dropout::keep_factor(dropout, &row_keys, key));
            }
            row::add(&mut sum, v, row::at(v, key, batch, kv_head), kept, plan.value_dim);
        }
        let stats_index = (batch * CUBE_COUNT_Y + head) * sizes.statistics + query;
        if keys.end > keys.first {
            row::scale(&mut sum, A::new(1.0) / row_sum, plan.value_dim);
            lse[stats_index as usize] = row_max + exp::ln::<A>(row_sum);
        } else {
            lse[stats_index as usize] = A::NEG_INFINITY;
        }
        row::write(out, query, batch, head, &sum, plan.value_dim);
    }
}
