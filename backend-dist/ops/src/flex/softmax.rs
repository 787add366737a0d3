//! Row by row operations on the scores of one block of queries.

use super::{
    lanes::{LANES, max, sum, sum2, vectorized},
    real::Real,
};
use crate::{dropout_mask::RowKey, options::AttentionOptions};

/// Applies `f` to the elements `low..high` of a row and zeroes the others, with selects on whole vectors instead of
/// partial ones.
#[inline(always)]
fn map_visible<E: Real>(row: &mut [E], low: usize, high: usize, f: impl Fn(E) -> E) {
    let (inside, after) = row.split_at_mut(high.next_multiple_of(LANES).min(row.len()));
    after.fill(E::ZERO);
    let (low, count) = (low as u32, (high - low) as u32);
    let one = |value: &mut E, j: u32| {
        let mapped = f(*value);
        *value = if j.wrapping_sub(low) < count { mapped } else { E::ZERO };
    };
    let (chunks, rest) = inside.as_chunks_mut::<LANES>();
    let start = (chunks.len() * LANES) as u32;
    for (c, chunk) in chunks.iter_mut().enumerate() {
        for (lane, value) in chunk.iter_mut().enumerate() {
            one(value, (c * LANES + lane) as u32);
        }
    }
    for (lane, value) in rest.iter_mut().enumerate() {
        one(value, start + lane as u32);
    }
}

vectorized! {
    /// Softmax numerators in place, zero where masked; their sums in `totals`, the maxima in `tops`.
    fn softmax_rows<E>(
        scores: &mut [E],
        first_query: i64,
        keys: [usize; 3],
        options: &AttentionOptions,
        totals: &mut [E],
        tops: &mut [E],
    ) {
        let [from, to, all] = keys;
        for (i, row) in scores.chunks_exact_mut(to - from).enumerate() {
            let (low, high) = options.visible(first_query + i as i64, all);
            tops[i] = max(&row[low - from..high - from]);
        }
        for (i, row) in scores.chunks_exact_mut(to - from).enumerate() {
            let (low, high) = options.visible(first_query + i as i64, all);
            let top = tops[i];
            map_visible(row, low - from, high - from, |score| (score - top).exp());
        }
        for (row, total) in scores.chunks_exact(to - from).zip(totals) {
            *total = sum(row, |p| p);
        }
    }
}

vectorized! {
    /// Probabilities in place from scores and log-sum-exp, zero where masked.
    fn probability_rows<E>(
        scores: &mut [E],
        first_query: i64,
        keys: [usize; 3],
        options: &AttentionOptions,
        lse: &[E],
    ) {
        let [from, to, all] = keys;
        for (i, row) in scores.chunks_exact_mut(to - from).enumerate() {
            let (low, high) = options.visible(first_query + i as i64, all);
            let lse = lse[i];
            map_visible(row, low - from, high - from, |score| (score - lse).exp());
        }
    }
}

vectorized! {
    /// `ds = p (dp - delta)` in place of `dp`.
    fn score_grad_rows<E>(dp: &mut [E], p: &[E], delta: &[E], keys: usize) {
        for ((dp, p), &delta) in dp.chunks_exact_mut(keys).zip(p.chunks_exact(keys)).zip(delta) {
            for (dp, &p) in dp.iter_mut().zip(p) {
                *dp = p * (*dp - delta);
            }
        }
    }
}

/// Scores `s` become `c tanh(s/c)`, if there is a softcap `c`.
pub(super) fn cap_rows<E: Real>(scores: &mut [E], options: &AttentionOptions) {
    if let Some(cap) = options.softcap.map(E::of) {
        scores.iter_mut().for_each(|score| *score = (*score / cap).tanh() * cap);
    }
}

/// Gradients of capped scores become those of the scores: times `1 - (capped/c)²`.
pub(super) fn cap_grad_rows<E: Real>(grads: &mut [E], capped: &[E], options: &AttentionOptions) {
    if let Some(cap) = options.softcap.map(E::of) {
        for (grad, capped) in grads.iter_mut().zip(capped) {
            let share = *capped / cap;
            *grad *= E::ONE - share * share;
        }
    }
}

vectorized! {
    /// `weights` with the dropped ones zero and the others times `scale`, as rows of `keys` columns; `first` is the
    /// index of the first column.
    fn drop_rows<E>(weights: &mut [E], rows: &[RowKey], first: u32, keys: usize, limit: u32, scale: E) {
        for (weights, row) in weights.chunks_exact_mut(keys).zip(rows) {
            for (i, weight) in weights.iter_mut().enumerate() {
                *weight = if row.draw(first + i as u32) >= limit { *weight * scale } else { E::ZERO };
            }
        }
    }
}

vectorized! {
    /// `Σ a b` of consecutive rows of `d` elements, with row strides `by_a` and `by_b`.
    fn row_dots<E>(a: &[E], by_a: usize, b: &[E], by_b: usize, d: usize, out: &mut [E]) {
        for (i, out) in out.iter_mut().enumerate() {
            *out = sum2(&a[i * by_a..][..d], &b[i * by_b..][..d], |a, b| a * b);
        }
    }
}
