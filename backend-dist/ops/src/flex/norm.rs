//! RMSNorm and LayerNorm, one row at a time: the row stays in the L1 cache between its passes. The backward pass
//! recomputes the statistics instead of saving them.

use std::borrow::Cow;

use burn::backend::flex::FlexTensor;
use burn::backend::{Flex, Shape};

use super::{
    lanes::{sum, sum2, sum3, vectorized},
    output::{Output, filled, filled_rows},
    parallel::{for_parts, parts},
    real::Real,
};
use crate::kernels::{NormGrads, NormNeeds};
use crate::options::Rms;

/// Mean (0 unless `center`) and `1/σ` of a row.
#[inline(always)]
fn statistics<E: Real>(x: &[E], eps: E, center: bool) -> (E, E) {
    let n = E::of(x.len() as f64);
    let mean = if center { sum(x, |x| x) / n } else { E::ZERO };
    let square = sum(x, |x| (x - mean) * (x - mean)) / n;
    (mean, E::ONE / (square + eps).sqrt())
}

vectorized! {
    fn forward_rows<E>(x: &[E], w: &[E], b: Option<&[E]>, out: &mut [E], eps: E) {
        let n = w.len();
        for (x, out) in x.chunks_exact(n).zip(out.chunks_exact_mut(n)) {
            let (x, out) = (&x[..n], &mut out[..n]);
            let (mean, inverse) = statistics(x, eps, b.is_some());
            match b {
                Some(b) => {
                    let b = &b[..n];
                    for i in 0..n {
                        out[i] = (x[i] - mean) * inverse * w[i] + b[i];
                    }
                }
                None => {
                    for i in 0..n {
                        out[i] = x[i] * inverse * w[i];
                    }
                }
            }
        }
    }
}

vectorized! {
    /// Gradient rows in `x`, and the sums over rows for the weight and the bias, each unless its slice is empty.
    fn backward_rows<E>(
        x: &[E],
        w: &[E],
        grad: &[E],
        eps: E,
        center: bool,
        dx: &mut [E],
        dw: &mut [E],
        db: &mut [E],
    ) {
        let n = w.len();
        let count = E::of(n as f64);
        for (r, (x, grad)) in x.chunks_exact(n).zip(grad.chunks_exact(n)).enumerate() {
            let (x, grad) = (&x[..n], &grad[..n]);
            let (mean, inverse) = statistics(x, eps, center);
            if !dx.is_empty() {
                let dx = &mut dx[r * n..(r + 1) * n];
                let along = sum3(grad, w, x, |grad, w, x| grad * w * (x - mean)) * inverse * inverse / count;
                let offset = if center { sum2(grad, w, |grad, w| grad * w) / count } else { E::ZERO };
                for i in 0..n {
                    dx[i] = (grad[i] * w[i] - offset - (x[i] - mean) * along) * inverse;
                }
            }
            if !dw.is_empty() {
                let dw = &mut dw[..n];
                for i in 0..n {
                    dw[i] += grad[i] * (x[i] - mean) * inverse;
                }
            }
            if !db.is_empty() {
                let db = &mut db[..n];
                for i in 0..n {
                    db[i] += grad[i];
                }
            }
        }
    }
}

/// Rough cost of one element of a row in picoseconds.
const FORWARD_COST: usize = 300;
const BACKWARD_COST: usize = 600;

pub(super) fn rms_forward<E: Real>(x: &FlexTensor, w: &FlexTensor, norm: Rms) -> FlexTensor {
    forward::<E>(x, w, None, norm)
}

pub(super) fn layer_forward<E: Real>(x: &FlexTensor, w: &FlexTensor, b: &FlexTensor, eps: f64) -> FlexTensor {
    forward::<E>(x, w, Some(b), eps.into())
}

/// What rows are multiplied with.
fn multiplier<E: Real>(w: &FlexTensor, norm: Rms) -> Cow<'_, [E]> {
    let w = E::slice(w);
    if norm.plus_one { w.iter().map(|w| E::ONE + *w).collect() } else { w.into() }
}

fn forward<E: Real>(x: &FlexTensor, w: &FlexTensor, b: Option<&FlexTensor>, norm: Rms) -> FlexTensor {
    let shape = x.layout().shape().clone();
    let (x, w, b, eps) = (E::slice(x), &*multiplier(w, norm), b.map(|b| E::slice(b)), E::of(norm.eps));
    let n = w.len();
    let rows = x.len() / n;
    let data = filled_rows([rows, n], n * FORWARD_COST, |_, span, out| forward_rows(&x[span], w, b, out, eps));
    E::tensor(data, shape)
}

pub(super) fn grads<E: Real>(
    x: &FlexTensor,
    w: &FlexTensor,
    grad: &FlexTensor,
    norm: Rms,
    needs: NormNeeds,
    center: bool,
) -> NormGrads<Flex> {
    let shape = x.layout().shape().clone();
    let (x, w, grad, eps) = (E::slice(x), &*multiplier(w, norm), E::slice(grad), E::of(norm.eps));
    let n = w.len();
    let rows = x.len() / n;
    let parts = parts(rows, n * BACKWARD_COST);
    // One partial sum for each part, added in order: the result does not depend on which thread took which part.
    let mut dw = vec![E::ZERO; if needs.w { parts * n } else { 0 }];
    let mut db = vec![E::ZERO; if needs.b { parts * n } else { 0 }];
    let dx = filled(if needs.x { x.len() } else { 0 }, |dx| {
        let (dw, db) = (Output::of(&mut dw), Output::of(&mut db));
        for_parts(rows, parts, |part, rows| {
            let span = rows.start * n..rows.end * n;
            let sums = |wanted: bool| if wanted { part * n..(part + 1) * n } else { 0..0 };
            // SAFETY: each part has its own rows and its own partial sums.
            let (dx, dw, db) = unsafe {
                (dx.slice(if needs.x { span.clone() } else { 0..0 }), dw.slice(sums(needs.w)), db.slice(sums(needs.b)))
            };
            backward_rows(&x[span.clone()], w, &grad[span], eps, center, dx, dw, db);
        });
    });
    let total = |partial: Vec<E>| E::tensor(add_up(partial, n), Shape::new([n]));
    NormGrads { x: needs.x.then(|| E::tensor(dx, shape)), w: needs.w.then(|| total(dw)), b: needs.b.then(|| total(db)) }
}

/// The sum of the rows of `n`.
fn add_up<E: Real>(mut rows: Vec<E>, n: usize) -> Vec<E> {
    let (first, others) = rows.split_at_mut(n);
    for row in others.chunks_exact(n) {
        for (a, &b) in first.iter_mut().zip(row) {
            *a += b;
        }
    }
    rows.truncate(n);
    rows
}
