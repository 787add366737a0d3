//! Softmax attention by blocks of queries: only the scores of one block of one head are stored, and heads are read and
//! written in place through their strides. The backward pass recomputes the scores from q, k and the log-sum-exp.

use burn::backend::Shape;
use burn::backend::flex::FlexTensor;

use super::{
    gemm::{Matrix, Onto, gemm},
    heads::{Heads, Input, Target},
    output::{Output, filled},
    parallel::{for_parts, parts},
    real::Real,
    softmax::{cap_grad_rows, cap_rows, drop_rows, probability_rows, row_dots, score_grad_rows, softmax_rows},
};
use crate::{
    dropout_mask::RowKey,
    options::{AttentionOptions, ScoreOffset},
};

/// Queries per block. Larger blocks make larger GEMMs, smaller ones compute fewer masked scores.
const BLOCK: usize = 128;

/// Sizes of one attention: batch, key/value heads, query heads per key/value head, queries, keys, features of a query
/// or key, features of a value.
#[derive(Clone, Copy)]
struct Sizes {
    b: usize,
    kv: usize,
    group: usize,
    s: usize,
    keys: usize,
    d: usize,
    dv: usize,
    place: ScoreOffset,
}

impl Sizes {
    fn of([q, k, v]: [&FlexTensor; 3], place: ScoreOffset) -> Self {
        let [q, k, v] = [q, k, v].map(|x| x.layout().shape());
        Self { b: q[1], kv: k[2], group: q[2] / k[2], s: q[0], keys: k[0], d: q[3], dv: v[3], place }
    }

    fn heads(&self) -> usize {
        self.kv * self.group
    }

    /// Position of query `query` among the keys.
    fn position(&self, query: usize) -> i64 {
        self.place.first_query + query as i64
    }

    /// Runs `f(batch, key/value head)` for all of them, on several threads if the work is large enough.
    fn for_kv_heads(&self, gemms: usize, f: impl Fn(usize, usize) + Sync) {
        let picoseconds = self.group * self.s * self.keys * ((self.d + self.dv) * gemms * 6 + 500);
        let n = self.b * self.kv;
        for_parts(n, parts(n, picoseconds), |_, part| part.for_each(|i| f(i / self.kv, i % self.kv)));
    }

    /// The blocks of queries and the keys visible to each: `(queries from, to, keys from, to)`.
    fn blocks(self, options: AttentionOptions) -> impl Iterator<Item = [usize; 4]> {
        (0..self.s).step_by(BLOCK).map(move |from| {
            let to = (from + BLOCK).min(self.s);
            let visible = |query| options.visible(self.position(query), self.keys);
            [from, to, visible(from).0, visible(to - 1).1]
        })
    }

    /// Applies dropout, if there is any, to the weights of queries `from..to` and keys `first..` of a head.
    fn drop<E: Real>(
        &self,
        weights: &mut [E],
        place: [usize; 2],
        [from, to, first]: [usize; 3],
        options: AttentionOptions,
    ) {
        let Some(dropout) = options.dropout else { return };
        let ScoreOffset { first: [query, key], queries, .. } = self.place;
        let rows: Vec<RowKey> = (from..to).map(|row| dropout.row(place, query + row, queries)).collect();
        let keys = weights.len() / rows.len();
        drop_rows(weights, &rows, (key + first) as u32, keys, dropout.limit(), E::of(dropout.scale()));
    }

    /// Elements of the largest score block.
    fn scratch(&self) -> usize {
        self.s.min(BLOCK) * self.keys
    }
}

/// Output `[s, b, hq, dv]` and log-sum-exp of the scaled scores `[b, hq, s]`; zero and minus infinity for a query that
/// sees no key.
pub(super) fn forward<E: Real>(
    qkv: [&FlexTensor; 3],
    options: AttentionOptions,
    place: ScoreOffset,
) -> (FlexTensor, FlexTensor) {
    let sizes = Sizes::of(qkv, place);
    let [q, k, v] = qkv.map(Input::<E>::of);
    let Sizes { b, s, d, dv, group, .. } = sizes;
    let heads = sizes.heads();
    let mut lse = vec![E::ZERO; b * heads * s];
    let out = filled(s * b * heads * dv, |data| {
        let lse = Output::of(&mut lse);
        let out = Target { data, heads: Heads::within(0, heads, b, dv) };
        sizes.for_kv_heads(2, |batch, kv| {
            let mut scores = vec![E::ZERO; sizes.scratch()];
            let mut totals = [E::ZERO; BLOCK];
            for head in kv * group..(kv + 1) * group {
                for [q0, q1, k0, k1] in sizes.blocks(options) {
                    let (rows, keys) = (q1 - q0, k1 - k0);
                    let scores = &mut scores[..rows * keys];
                    let first = (batch * heads + head) * s;
                    if keys == 0 {
                        // SAFETY: the rows of this head belong to this thread.
                        unsafe {
                            out.clear(q0..q1, [batch, head], dv);
                            lse.slice(first + q0..first + q1).fill(E::NEG_INFINITY);
                        }
                        continue;
                    }
                    // SAFETY: inputs outlive the call; scores and the rows of this head belong to this thread.
                    unsafe {
                        let block = Matrix::rows(scores.as_mut_ptr(), keys as isize);
                        let (q, k) = (q.matrix(q0, batch, head), k.matrix(k0, batch, kv).transposed());
                        gemm([rows, keys, d], block, q, k, E::of(options.scale), Onto::Overwrite);
                        cap_rows(scores, &options);
                        let lse = lse.slice(first + q0..first + q1);
                        let totals = &mut totals[..rows];
                        softmax_rows(scores, sizes.position(q0), [k0, k1, sizes.keys], &options, totals, lse);
                        sizes.drop(scores, [batch, head], [q0, q1, k0], options);
                        let p = Matrix::rows(scores.as_ptr(), keys as isize);
                        let target = out.matrix(q0, batch, head);
                        gemm([rows, dv, keys], target, p, v.matrix(k0, batch, kv), E::ONE, Onto::Overwrite);
                        out.divide_rows([q0, batch, head], dv, totals);
                        // So far the log-sum-exp holds the maxima.
                        lse.iter_mut().zip(totals).for_each(|(lse, total)| *lse += total.ln());
                    }
                }
            }
        });
    });
    (E::tensor(out, Shape::new([s, b, heads, dv])), E::tensor(lse, Shape::new([b, heads, s])))
}

/// Gradients in q, k and v as separate tensors; `out` and `grad` must be dense.
pub(super) fn grads<E: Real>(
    [q, k, v]: [&FlexTensor; 3],
    out: &FlexTensor,
    lse: &FlexTensor,
    grad: &FlexTensor,
    options: AttentionOptions,
    place: ScoreOffset,
) -> [FlexTensor; 3] {
    let sizes = Sizes::of([q, k, v], place);
    let Sizes { b, s, keys, d, kv, .. } = sizes;
    let heads = sizes.heads();
    let (mut dk, mut dv) = (Vec::new(), Vec::new());
    let dq = filled(s * b * heads * d, |dq| {
        dk = filled(keys * b * kv * d, |dk| {
            dv = filled(keys * b * kv * sizes.dv, |dv| {
                let dq = Target { data: dq, heads: Heads::within(0, heads, b, d) };
                let dk = Target { data: dk, heads: Heads::within(0, kv, b, d) };
                let dv = Target { data: dv, heads: Heads::within(0, kv, b, sizes.dv) };
                write_grads::<E>(sizes, [q, k, v, out, grad], E::slice(lse), options, [dq, dk, dv]);
            });
        });
    });
    let shape = |rows, heads, length| Shape::new([rows, b, heads, length]);
    [E::tensor(dq, shape(s, heads, d)), E::tensor(dk, shape(keys, kv, d)), E::tensor(dv, shape(keys, kv, sizes.dv))]
}

/// The packed gradient `[s, b, heads + 2 kv_heads, d]` of q, k and v; `out` and `grad` must be dense.
pub(super) fn packed_grad<E: Real>(
    [q, k, v]: [&FlexTensor; 3],
    out: &FlexTensor,
    lse: &FlexTensor,
    grad: &FlexTensor,
    options: AttentionOptions,
) -> FlexTensor {
    let s = q.layout().shape()[0];
    let sizes = Sizes::of([q, k, v], ScoreOffset::whole(s, s));
    let Sizes { b, d, kv, .. } = sizes;
    let (heads, all) = (sizes.heads(), sizes.heads() + 2 * kv);
    let data = filled(s * b * all * d, |data| {
        let part = |first| Target { data, heads: Heads::within(first, all, b, d) };
        let parts = [part(0), part(heads), part(heads + kv)];
        write_grads::<E>(sizes, [q, k, v, out, grad], E::slice(lse), options, parts);
    });
    E::tensor(data, Shape::new([s, b, all, d]))
}

fn write_grads<E: Real>(
    sizes: Sizes,
    inputs: [&FlexTensor; 5],
    lse: &[E],
    options: AttentionOptions,
    [dq, dk, dv]: [Target<'_, E>; 3],
) {
    let [q, k, v, out, grad] = inputs.map(Input::<E>::of);
    let Sizes { s, d, group, .. } = sizes;
    let heads = sizes.heads();
    sizes.for_kv_heads(5, |batch, kv| {
        let mut p = vec![E::ZERO; sizes.scratch()];
        let mut ds = vec![E::ZERO; sizes.scratch()];
        let mut capped = vec![E::ZERO; if options.softcap.is_some() { sizes.scratch() } else { 0 }];
        let mut delta = [E::ZERO; BLOCK];
        // Several blocks or query heads add to the same keys and values; a single one that sees all of them overwrites.
        let sees_all = |[_, _, k0, k1]: [usize; 4]| k0 == 0 && k1 == sizes.keys;
        let once = group == 1 && s <= BLOCK && sizes.blocks(options).all(sees_all);
        let onto = if once { Onto::Overwrite } else { Onto::Add };
        if onto == Onto::Add {
            // SAFETY: this thread alone writes this head's keys and values.
            unsafe {
                dk.clear(0..sizes.keys, [batch, kv], d);
                dv.clear(0..sizes.keys, [batch, kv], sizes.dv);
            }
        }
        for head in kv * group..(kv + 1) * group {
            for [q0, q1, k0, k1] in sizes.blocks(options) {
                let (rows, keys) = (q1 - q0, k1 - k0);
                let (p, ds) = (&mut p[..rows * keys], &mut ds[..rows * keys]);
                if keys == 0 {
                    // SAFETY: the queries of this head belong to this thread.
                    unsafe { dq.clear(q0..q1, [batch, head], d) };
                    continue;
                }
                let first = (batch * heads + head) * s;
                let scale = E::of(options.scale);
                let (by_grad, by_out) = (grad.heads.strides[0] as usize, out.heads.strides[0] as usize);
                let (from_grad, from_out) = (grad.from(q0, batch, head), out.from(q0, batch, head));
                row_dots(from_grad, by_grad, from_out, by_out, sizes.dv, &mut delta[..rows]);
                // SAFETY: inputs outlive the call; p, ds and the gradients of this head belong to this thread.
                unsafe {
                    let block = |x: &mut [E]| Matrix::rows(x.as_mut_ptr(), keys as isize);
                    let read = |x: &[E]| Matrix::rows(x.as_ptr(), keys as isize);
                    let (q, grad) = (q.matrix(q0, batch, head), grad.matrix(q0, batch, head));
                    let (k, v) = (k.matrix(k0, batch, kv), v.matrix(k0, batch, kv));
                    gemm([rows, keys, d], block(p), q, k.transposed(), scale, Onto::Overwrite);
                    cap_rows(p, &options);
                    capped.iter_mut().zip(&*p).for_each(|(capped, score)| *capped = *score);
                    probability_rows(
                        p,
                        sizes.position(q0),
                        [k0, k1, sizes.keys],
                        &options,
                        &lse[first + q0..first + q1],
                    );
                    let target = dv.matrix(k0, batch, kv);
                    let dropped = options.dropout.is_some().then(|| {
                        ds.copy_from_slice(p);
                        sizes.drop(ds, [batch, head], [q0, q1, k0], options);
                        &*ds
                    });
                    let kept = read(dropped.unwrap_or(p)).transposed();
                    gemm([keys, sizes.dv, rows], target, kept, grad, E::ONE, onto);
                    gemm([rows, keys, sizes.dv], block(ds), grad, v.transposed(), E::ONE, Onto::Overwrite);
                    sizes.drop(ds, [batch, head], [q0, q1, k0], options);
                    score_grad_rows(ds, p, &delta[..rows], keys);
                    cap_grad_rows(ds, &capped, &options);
                    gemm([rows, d, keys], dq.matrix(q0, batch, head), read(ds), k, scale, Onto::Overwrite);
                    gemm([keys, d, rows], dk.matrix(k0, batch, kv), read(ds).transposed(), q, scale, onto);
                }
            }
        }
    });
}
