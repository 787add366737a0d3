//! The forward kernel: a unit takes one query of one head through all the keys that it sees.
use super::draw::{self, Draws};
use super::sight::{self, Plan, Sizes};
use super::{exponential, row};
use cubecl::prelude::*;

/// `out = softmax(q kᵀ · scale) v` and the log-sum-exp of the scaled scores; zero and -∞ for a query that sees no key.
/// Cube `(block of queries, head, batch)`.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn forward<E: Float, A: Float>(
    q: &Tensor<E>,
    k: &Tensor<E>,
    v: &Tensor<E>,
    out: &mut Tensor<E>,
    lse: &mut [A],
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
        let mut sum = Array::<A>::new(plan.value_dim);
        row::fill(&mut sum, plan.value_dim);
        let words = draw::row_words(draws, batch, head, query);
        let keys = sight::visible_keys(query, query_starts, key_starts, sizes, plan);
        let mut top = A::new(-1.0e30);
        let mut total = A::new(0.0);
        for key in keys.first..keys.end {
            let score = row::dot(k, row::at(k, key, batch, kv_head), &asked, plan.head_dim) * scale;
            if score > top {
                let factor = exponential::exp::<A>(top - score);
                total *= factor;
                row::scale(&mut sum, factor, plan.value_dim);
                top = score;
            }
            let weight = exponential::exp::<A>(score - top);
            total += weight;
            let mut kept = weight;
            if comptime![plan.dropout] {
                kept = weight * A::cast_from(draw::keep(draws, &words, key));
            }
            row::add(&mut sum, v, row::at(v, key, batch, kv_head), kept, plan.value_dim);
        }
        let place = (batch * CUBE_COUNT_Y + head) * sizes.statistics + query;
        if keys.end > keys.first {
            row::scale(&mut sum, A::new(1.0) / total, plan.value_dim);
            lse[place as usize] = top + exponential::ln::<A>(total);
        } else {
            lse[place as usize] = A::NEG_INFINITY;
        }
        row::write(out, query, batch, head, &sum, plan.value_dim);
    }
}
