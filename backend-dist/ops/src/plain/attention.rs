//! Softmax attention with the whole score matrix.

use std::ops::Range;

use burn::backend::{Backend, FloatDType, IntDType, Scalar, Shape, TensorData, TensorMetadata, tensor::FloatTensor};

use super::activation::{softcap, softcap_grad};
use super::{dims, last, narrow, reshape, scale, widen};
use crate::dtype::cast;
use crate::kernels::LocalKernels;
use crate::options::{AttentionOptions, PackedHeads, ScoreOffset};

/// Added to a masked score: below every score, but finite in f32.
const HIDDEN: f64 = -1e30;

/// Sizes of one attention: batch, key/value heads, query heads per key/value head, queries, keys; and the position of
/// its scores.
struct Sizes {
    b: usize,
    kv: usize,
    group: usize,
    s: usize,
    keys: usize,
    place: ScoreOffset,
}

impl Sizes {
    fn new<B: Backend>(q: &FloatTensor<B>, k: &FloatTensor<B>, place: ScoreOffset) -> Self {
        let (q, k) = (dims(q), dims(k));
        Self { b: q[1], kv: k[2], group: q[2] / k[2], s: q[0], keys: k[0], place }
    }

    /// `[s, b, h, d]` to `[b, kv, group·s, d]`: the query heads of one key/value head are concatenated.
    fn queries<B: Backend>(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        let x = B::float_permute(widen::<B>(x).0, &[1, 2, 0, 3]);
        let d = last(&x);
        reshape::<B>(x, [self.b, self.kv, self.group * self.s, d])
    }

    /// `[b, kv, group·s, d]` back to `[s, b, h, d]`.
    fn heads<B: Backend>(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        let d = last(&x);
        let x = reshape::<B>(x, [self.b, self.kv * self.group, self.s, d]);
        B::float_permute(x, &[2, 0, 1, 3])
    }

    /// `[s, b, kv, d]` to `[b, kv, s, d]`.
    fn keys<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
        B::float_permute(widen::<B>(x).0, &[1, 2, 0, 3])
    }

    /// Scaled and capped scores `[b, kv, group·s, keys]`, not masked.
    fn scores<B: LocalKernels>(
        &self,
        q: FloatTensor<B>,
        k: FloatTensor<B>,
        options: AttentionOptions,
    ) -> FloatTensor<B> {
        let scores = scale::<B>(B::matmul(q, B::float_swap_dims(k, 2, 3)), options.scale);
        match options.softcap {
            Some(cap) => softcap::<B>(scores, cap),
            None => scores,
        }
    }

    /// The scores with masked ones far below all others.
    fn masked<B: Backend>(&self, scores: FloatTensor<B>, options: AttentionOptions) -> FloatTensor<B> {
        if !options.causal && options.window.is_none() {
            return scores;
        }
        let hidden = self.hidden::<B>(&scores, options);
        let scores = reshape::<B>(scores, [self.b * self.kv, self.group, self.s, self.keys]);
        reshape::<B>(B::float_add(scores, hidden), [self.b, self.kv, self.group * self.s, self.keys])
    }

    /// `[1, 1, s, keys]`: 0 where the key is visible, else at most [`HIDDEN`].
    fn hidden<B: Backend>(&self, like: &FloatTensor<B>, options: AttentionOptions) -> FloatTensor<B> {
        let device = like.device();
        let range = |r: Range<i64>, shape: [usize; 4]| {
            let range = B::int_arange(r, &device, IntDType::I32);
            B::int_into_float(B::int_reshape(range, Shape::new(shape)), FloatDType::from(like.dtype()))
        };
        let first = self.place.first_query;
        let query = range(first..first + self.s as i64, [1, 1, self.s, 1]);
        let key = range(0..self.keys as i64, [1, 1, 1, self.keys]);
        let ahead = B::float_sub(key, query);
        // The distance of a key from the last (first) visible one, at most 1.
        let beyond = |x: FloatTensor<B>, reach: f64| {
            let x = B::float_add_scalar(x, Scalar::Float(-reach));
            B::float_clamp(x, Scalar::Float(0.0), Scalar::Float(1.0))
        };
        // Without a window, larger than any distance.
        let reach = options.window.map_or(self.keys as f64 + first.abs() as f64 + self.s as f64, |w| w as f64 - 1.0);
        let after = beyond(ahead.clone(), if options.causal { 0.0 } else { reach });
        let before = beyond(B::float_neg(ahead), reach);
        scale::<B>(B::float_add(after, before), HIDDEN)
    }

    /// `p [b, kv, group·s, keys]` with its dropped weights zero and the others scaled.
    fn drop<B: Backend>(&self, p: FloatTensor<B>, options: AttentionOptions) -> FloatTensor<B> {
        let Some(dropout) = options.dropout else { return p };
        let ScoreOffset { first: [first_query, first_key], queries, .. } = self.place;
        let (limit, factor) = (dropout.limit(), dropout.scale());
        let heads = self.kv * self.group;
        let rows = (0..self.b * heads * self.s).map(|i| {
            let (place, query) = (i / self.s, i % self.s);
            dropout.row([place / heads, place % heads], first_query + query, queries)
        });
        let keep = |draw| if draw >= limit { factor } else { 0.0 };
        let keys = first_key as u32..(first_key + self.keys) as u32;
        let mask: Vec<f64> = rows.flat_map(|row| keys.clone().map(move |key| keep(row.draw(key)))).collect();
        let mask = TensorData::new(mask, p.shape()).convert_dtype(p.dtype());
        let mask = B::float_from_data(mask, &p.device());
        B::float_mul(p, mask)
    }
}

/// Output `[s, b, hq, dv]` and log-sum-exp `[b, hq, s]`.
pub fn forward<B: LocalKernels>(
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    options: AttentionOptions,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let place = ScoreOffset::whole(dims(&q)[0], dims(&k)[0]);
    forward_at::<B>([q, k, v], options, place)
}

/// The same for queries at any position, if each sees a key.
pub fn forward_at<B: LocalKernels>(
    [q, k, v]: [FloatTensor<B>; 3],
    options: AttentionOptions,
    place: ScoreOffset,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let dtype = q.dtype();
    let sizes = Sizes::new::<B>(&q, &k, place);
    let scores = sizes.scores::<B>(sizes.queries::<B>(q), Sizes::keys::<B>(k), options);
    let scores = sizes.masked::<B>(scores, options);
    let max = B::float_max_dim(scores.clone(), 3);
    let p = B::float_exp(B::float_sub(scores, max.clone()));
    let sum = B::sum_dim(p.clone(), 3);
    let out = B::float_div(B::matmul(sizes.drop::<B>(p, options), Sizes::keys::<B>(v)), sum.clone());
    let lse = B::float_add(max, B::float_log(sum));
    let lse = reshape::<B>(lse, [sizes.b, sizes.kv * sizes.group, sizes.s]);
    (cast::<B>(sizes.heads::<B>(out), dtype), lse)
}

/// Gradients in q, k and v. With `p = exp(scores - lse)`: `dv = pᵀ do`, `ds = p (do vᵀ - Σ do·out)`, `dq = ds k`, `dk =
/// dsᵀ q`; the GEMMs sum over the query heads of a key/value head. Dropout multiplies `p` in `dv` and `do vᵀ`.
pub fn grads<B: LocalKernels>(
    qkv: [FloatTensor<B>; 3],
    result: [FloatTensor<B>; 2],
    grad: FloatTensor<B>,
    options: AttentionOptions,
) -> [FloatTensor<B>; 3] {
    let place = ScoreOffset::whole(dims(&qkv[0])[0], dims(&qkv[1])[0]);
    grads_at::<B>(qkv, result, grad, options, place)
}

/// The same for queries at any position; output and log-sum-exp may be those of more keys than these.
pub fn grads_at<B: LocalKernels>(
    [q, k, v]: [FloatTensor<B>; 3],
    [out, lse]: [FloatTensor<B>; 2],
    grad: FloatTensor<B>,
    options: AttentionOptions,
    place: ScoreOffset,
) -> [FloatTensor<B>; 3] {
    let dtype = q.dtype();
    let sizes = Sizes::new::<B>(&q, &k, place);
    let (q, out, grad) = (sizes.queries::<B>(q), sizes.queries::<B>(out), sizes.queries::<B>(grad));
    let (k, v) = (Sizes::keys::<B>(k), Sizes::keys::<B>(v));
    let lse = reshape::<B>(lse, [sizes.b, sizes.kv, sizes.group * sizes.s, 1]);
    let scores = sizes.scores::<B>(q.clone(), k.clone(), options);
    let p = B::float_exp(B::float_sub(sizes.masked::<B>(scores.clone(), options), lse));
    let dv = B::matmul(B::float_swap_dims(sizes.drop::<B>(p.clone(), options), 2, 3), grad.clone());
    let delta = B::sum_dim(B::float_mul(grad.clone(), out), 3);
    let dp = sizes.drop::<B>(B::matmul(grad, B::float_swap_dims(v, 2, 3)), options);
    let ds = B::float_mul(p, B::float_sub(dp, delta));
    let ds = match options.softcap {
        Some(cap) => softcap_grad::<B>(scores, ds, cap),
        None => ds,
    };
    let ds = scale::<B>(ds, options.scale);
    let dq = B::matmul(ds.clone(), k);
    let dk = B::matmul(B::float_swap_dims(ds, 2, 3), q);
    let [dk, dv] = [dk, dv].map(|x| cast::<B>(B::float_permute(x, &[2, 0, 1, 3]), dtype));
    [cast::<B>(sizes.heads::<B>(dq), dtype), dk, dv]
}

/// `[q | k | v]` split.
pub fn unpack<B: Backend>(qkv: FloatTensor<B>, heads: PackedHeads) -> [FloatTensor<B>; 3] {
    let (q, k) = (heads.heads, heads.heads + heads.kv_heads);
    [(0, q), (q, k), (k, heads.total())].map(|(from, to)| narrow::<B>(qkv.clone(), 2, from, to))
}
