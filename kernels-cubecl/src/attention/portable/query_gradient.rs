//! The gradient of the queries: a unit takes one query of one head through all the keys that it sees.
use super::draw::{self, Draws};
use super::sight::{self, Plan, Sizes};
use super::{exponential, row};
use cubecl::prelude::*;

/// With `p = exp(q k · scale - lse)` and `keep` what dropout multiplies a weight with: `ds = p (keep · do v - delta)`,
/// `delta = Σ do out`, `dq = scale Σ ds k`. `delta` is left for the gradient of the keys.
/// Cube `(block of queries, head, batch)`.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn query_gradient<E: Float, A: Float>(
    q: &Tensor<E>,
    k: &Tensor<E>,
    v: &Tensor<E>,
    out: &Tensor<E>,
    out_gradient: &Tensor<E>,
    lse: &[A],
    delta: &mut [A],
    q_gradient: &mut Tensor<E>,
    query_starts: &[i32],
    key_starts: &[i32],
    sizes: &Sizes,
    draws: &Draws,
    scale: InputScalar,
    #[comptime] plan: Plan,
) {
    let query = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    let (head, batch) = (CUBE_POS_Y, CUBE_POS_Z);
    if query < sizes.queries {
        let kv_head = head / sizes.group;
        let scale = scale.get::<A>();
        let mut asked = Array::<A>::new(plan.head_dim);
        row::read(q, row::at(q, query, batch, head), &mut asked, plan.head_dim);
        let mut slope = Array::<A>::new(plan.value_dim);
        row::read(out_gradient, row::at(out_gradient, query, batch, head), &mut slope, plan.value_dim);
        let place = ((batch * CUBE_COUNT_Y + head) * sizes.statistics + query) as usize;
        let share = row::dot(out, row::at(out, query, batch, head), &slope, plan.value_dim);
        delta[place] = share;
        let log_total = lse[place];
        let words = draw::row_words(draws, batch, head, query);
        let keys = sight::visible_keys(query, query_starts, key_starts, sizes, plan);
        let mut sum = Array::<A>::new(plan.head_dim);
        row::fill(&mut sum, plan.head_dim);
        for key in keys.first..keys.end {
            let key_at = row::at(k, key, batch, kv_head);
            let weight = exponential::exp::<A>(row::dot(k, key_at, &asked, plan.head_dim) * scale - log_total);
            let mut pull = row::dot(v, row::at(v, key, batch, kv_head), &slope, plan.value_dim);
            if comptime![plan.dropout] {
                pull *= A::cast_from(draw::keep(draws, &words, key));
            }
            row::add(&mut sum, k, key_at, weight * (pull - share), plan.head_dim);
        }
        row::scale(&mut sum, scale, plan.head_dim);
        row::write(q_gradient, query, batch, head, &sum, plan.head_dim);
    }
}
