//! The gradients of the keys and values: a unit takes one key of one key head through all the queries that see it, head
//! by head, so that every sum has one order.
use super::draw::{self, Draws};
use super::sight::{self, Plan, Sizes};
use super::{exponential, row};
use cubecl::prelude::*;

/// With `p`, `ds` and `keep` as in the gradient of the queries: `dv = Σ keep p do`, `dk = scale Σ ds q` over the
/// queries of all heads of the group. Cube `(block of keys, key head, batch)`.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn key_gradient<E: Float, A: Float>(
    q: &Tensor<E>,
    k: &Tensor<E>,
    v: &Tensor<E>,
    out_gradient: &Tensor<E>,
    lse: &[A],
    delta: &[A],
    k_gradient: &mut Tensor<E>,
    v_gradient: &mut Tensor<E>,
    query_starts: &[i32],
    key_starts: &[i32],
    sizes: &Sizes,
    draws: &Draws,
    scale: InputScalar,
    #[comptime] plan: Plan,
) {
    let key = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    let (kv_head, batch) = (CUBE_POS_Y, CUBE_POS_Z);
    if key < sizes.keys {
        let scale = scale.get::<A>();
        let mut own_key = Array::<A>::new(plan.head_dim);
        row::read(k, row::at(k, key, batch, kv_head), &mut own_key, plan.head_dim);
        let mut own_value = Array::<A>::new(plan.value_dim);
        row::read(v, row::at(v, key, batch, kv_head), &mut own_value, plan.value_dim);
        let mut key_sum = Array::<A>::new(plan.head_dim);
        row::fill(&mut key_sum, plan.head_dim);
        let mut value_sum = Array::<A>::new(plan.value_dim);
        row::fill(&mut value_sum, plan.value_dim);
        let queries = sight::visible_queries(key, query_starts, key_starts, sizes, plan);
        for nth in 0..sizes.group {
            let head = kv_head * sizes.group + nth;
            let statistics = (batch * CUBE_COUNT_Y * sizes.group + head) * sizes.statistics;
            for query in queries.first..queries.end {
                let place = (statistics + query) as usize;
                let (query_at, slope_at) = (row::at(q, query, batch, head), row::at(out_gradient, query, batch, head));
                let score = row::dot(q, query_at, &own_key, plan.head_dim) * scale;
                let weight = exponential::exp::<A>(score - lse[place]);
                let mut pull = row::dot(out_gradient, slope_at, &own_value, plan.value_dim);
                let mut kept = weight;
                if comptime![plan.dropout] {
                    let words = draw::row_words(draws, batch, head, query);
                    let keep = A::cast_from(draw::keep(draws, &words, key));
                    pull *= keep;
                    kept = weight * keep;
                }
                row::add(&mut value_sum, out_gradient, slope_at, kept, plan.value_dim);
                row::add(&mut key_sum, q, query_at, weight * (pull - delta[place]), plan.head_dim);
            }
        }
        row::scale(&mut key_sum, scale, plan.head_dim);
        row::write(k_gradient, key, batch, kv_head, &key_sum, plan.head_dim);
        row::write(v_gradient, key, batch, kv_head, &value_sum, plan.value_dim);
    }
}
