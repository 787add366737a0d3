//! What modules write where the device recognizes attention, norms, biases and dropout, and what is written much alike.

use crate::operations::{Inputs, Operation, flat};
use burn::tensor::activation::softmax;
use burn::tensor::{Bool, Distribution, Tensor};

/// `[a, b, c]` as two heads `[a, 2, b, c / 2]`.
fn heads(x: Tensor<3>) -> Tensor<4> {
    let [a, b, c] = x.dims();
    x.reshape([a, b, 2, c / 2]).swap_dims(1, 2)
}

fn qkv(i: &Inputs) -> [Tensor<4>; 3] {
    [i.x.clone(), i.y.clone(), i.y.clone() * 0.7 + 0.1].map(heads)
}

/// Some keys of each sample, `[a, 1, 1, b]`; all of some.
fn hidden(i: &Inputs, value: i64) -> Tensor<4, Bool> {
    let [a, b, _] = i.x.dims();
    let first = i.index.clone().slice([0..a, 0..b, 0..1]).reshape([a, 1, 1, b]);
    let all = i.index.clone().slice([0..a, 0..1, 0..1]).reshape([a, 1, 1, 1]).equal_elem(value).expand([a, 1, 1, b]);
    first.equal_elem(value).bool_or(all)
}

/// Of each query `[1, 1, b, b]`, the keys after it.
fn later(i: &Inputs) -> Tensor<4, Bool> {
    let b = i.x.dims()[1];
    Tensor::<2, Bool>::tril_mask([b, b], 0, &i.x.device()).reshape([1, 1, b, b])
}

fn masked(scores: Tensor<4>, mask: Tensor<4, Bool>) -> Tensor<4> {
    let scores = scores.mask_fill(mask.clone(), f32::NEG_INFINITY).mask_fill(mask.clone().all_dim(3), 0.0);
    softmax(scores, 3).mask_fill(mask, 0.0)
}

fn attend([q, k, v]: [Tensor<4>; 3], mask: Tensor<4, Bool>, scale: f64) -> Tensor<4> {
    masked(q.matmul(k.transpose()) * scale, mask).matmul(v)
}

fn kept(shape: [usize; 4], probability: f64, like: &Tensor<4>) -> Tensor<4> {
    Tensor::random(shape, Distribution::Bernoulli(probability), (&like.device(), like.dtype()))
}

fn dropout(x: Tensor<4>, p: f64) -> Tensor<4> {
    let kept = kept(x.dims(), 1.0 - p, &x);
    x * kept * (1.0 / (1.0 - p))
}

fn square(x: Tensor<3>) -> Tensor<3> {
    let c = x.dims()[2];
    x.clone().transpose().matmul(x).sum_dim(0).reshape([1, c, c]) * 0.3
}

/// Mean 0 and variance 1 of rows, and the centered rows.
fn norm(x: Tensor<3>) -> [Tensor<3>; 2] {
    let centered = x.clone() - x.mean_dim(2);
    let variance = centered.clone().powf_scalar(2.0).mean_dim(2);
    [centered.clone() / (variance + 1e-5).sqrt(), centered]
}

pub const PATTERNS: &[Operation] = &[
    ("attention with a padding mask", |i| flat(attend(qkv(&i), hidden(&i, 1), 0.3))),
    ("with a mask of queries", |i| flat(attend(qkv(&i), later(&i), 0.3))),
    ("with a mask of masks", |i| {
        let [a, b, _] = i.x.dims();
        let mask = hidden(&i, 1).expand([a, 1, b, b]).bool_or(later(&i).expand([a, 1, b, b]));
        flat(attend(qkv(&i), mask.bool_not().bool_not().expand([a, 2, b, b]), 0.3))
    }),
    ("with what a mask does not hide", |i| flat(attend(qkv(&i), hidden(&i, 1).bool_not(), 0.3))),
    ("one mask for two scales", |i| {
        let mask = hidden(&i, 1);
        flat(attend(qkv(&i), mask.clone(), 0.3) + attend(qkv(&i), mask, 0.6))
    }),
    ("two masks of one attention", |i| {
        let [q, k, v] = qkv(&i);
        let scores = q.matmul(k.transpose()) * 0.3;
        flat(masked(scores.clone(), hidden(&i, 1)).matmul(v.clone()) + masked(scores, hidden(&i, 0)).matmul(v))
    }),
    ("one softmax for two values", |i| {
        let [q, k, v] = qkv(&i);
        let weights = masked(q.matmul(k.clone().transpose()) * 0.3, hidden(&i, 1));
        flat(weights.clone().matmul(v) * 2.0 + weights.matmul(k))
    }),
    ("one softmax for two values, one detached", |i| {
        let [q, k, v] = qkv(&i);
        let weights = masked(q.matmul(k.clone().transpose()) * 0.3, hidden(&i, 1));
        flat(weights.clone().matmul(v).detach() + weights.matmul(k))
    }),
    ("weights that are read", |i| {
        let [q, k, v] = qkv(&i);
        let weights = masked(q.matmul(k.transpose()) * 0.3, later(&i));
        flat(weights.clone().matmul(v)).sum() + flat(weights.powf_scalar(2.0))
    }),
    ("scores that are read", |i| {
        let [q, k, v] = qkv(&i);
        let scores = q.matmul(k.transpose()) * 0.3;
        flat(softmax(scores.clone(), 3).matmul(v)).sum() + flat(scores)
    }),
    ("queries, keys and values of one", |i| {
        let x = heads(i.x);
        flat(softmax(x.clone().matmul(x.clone().transpose()) * 0.3, 3).matmul(x)).sum() + i.y.sum()
    }),
    ("keys of all samples", |i| {
        let ([q, k, v], b) = (qkv(&i), i.x.dims()[1]);
        let c = k.dims()[3];
        let k = k.sum_dim(0).sum_dim(1).reshape([1, 1, b, c]);
        flat(softmax(q.matmul(k.transpose()) * 0.3, 3).matmul(v))
    }),
    ("values of all samples", |i| {
        let [q, k, v] = qkv(&i);
        flat(softmax(q.matmul(k.transpose()) * 0.3, 3).matmul(v.sum_dim(0)))
    }),
    ("attention of every weight", |i| {
        let [q, k, v] = qkv(&i);
        let weights = softmax(q.matmul(k.transpose()) * 0.3, 3);
        let kept = kept(weights.dims(), 1.0, &weights);
        flat((weights * kept).matmul(v))
    }),
    ("a norm whose input changes", |i| {
        let [x, _] = norm(i.x.clone());
        let changed = i.x * 2.0 + i.y;
        flat(x * changed)
    }),
    ("a norm and its parts", |i| {
        let [x, centered] = norm(i.x + i.y.clone());
        flat(x.clone().matmul(square(i.y)) + centered.clone()).sum() + flat(Tensor::cat(vec![x, centered], 0))
    }),
    ("a norm of a view", |i| {
        let b = i.x.dims()[1];
        let [x, centered] = norm(i.x.swap_dims(1, 2).slice([0..1]));
        let y = i.y.swap_dims(1, 2).slice([0..1]);
        flat(x.clone().swap_dims(1, 2) + centered.swap_dims(1, 2)).sum() + flat((x * y).slice([0..1, 0..1, 0..b]))
    }),
    ("a norm that is moved", |i| {
        let [a, b, c] = i.x.dims();
        let [x, centered] = norm(i.x * i.y);
        let moved = x.clone().reshape([a, b, 2, c / 2]).swap_dims(1, 2).swap_dims(2, 3);
        flat(moved.clone() * 2.0).sum() + flat(moved.sum_dim(1)).sum() + flat(x.swap_dims(0, 1)) + flat(centered)
    }),
    ("a norm that is detached", |i| {
        let [x, centered] = norm(i.x + i.y);
        let still = x.clone().detach();
        flat(x * still.clone() + centered).sum() + flat(still)
    }),
    ("norms of norms", |i| {
        let [x, centered] = norm(i.x.clone() + i.y.clone());
        let [y, _] = norm(x.clone() * 0.5 + centered);
        flat(y.clone().matmul(square(i.y)) + x * i.x).sum() + flat(y)
    }),
    ("rows times columns", |i| {
        let c = i.x.dims()[2];
        let (rows, columns) = (i.x.sum_dim(2), i.y.clone().sum_dim(0).sum_dim(1).reshape([1, 1, c]));
        let product = rows * columns;
        flat(product.clone().matmul(square(i.y))) + flat(product.swap_dims(0, 1))
    }),
    ("a layer summed over samples", |i| flat(i.x.matmul(square(i.y)).sum_dim(0))),
    ("a row for all samples", |i| {
        let [a, b, c] = i.x.dims();
        let row = i.x.clone().slice([0..1]).expand([a, b, c]);
        flat(row.matmul(square(i.y.clone())) * i.y)
    }),
    ("a bias after another use", |i| {
        let bias = i.y.clone().slice([0..1, 0..1]);
        let y = i.x.matmul(square(i.y));
        flat((y.clone() + bias) * y)
    }),
    ("a bias before another use", |i| {
        let bias = i.y.clone().slice([0..1, 0..1]);
        let y = i.x.matmul(square(i.y));
        flat(y.clone() * 3.0) + flat(y + bias)
    }),
    ("one bias for two layers", |i| {
        let bias = i.y.clone().slice([0..1, 0..1]);
        let weight = square(i.y);
        let y = (i.x.matmul(weight.clone()) + bias.clone()).tanh();
        flat(y.matmul(weight.transpose()) + bias)
    }),
    ("a bias without a gradient", |i| {
        let bias = i.y.clone().slice([0..1, 0..1]).detach();
        flat(i.x.matmul(square(i.y)) + bias)
    }),
    ("a bias that is a layer's output", |i| {
        let weight = square(i.y.clone());
        let bias = i.y.slice([0..1, 0..1]).matmul(weight.clone());
        flat(i.x.matmul(weight) + bias)
    }),
    ("a bias of ones", |i| {
        let bias = i.x.clone().slice([0..1, 0..1]).ones_like();
        flat(i.x.matmul(square(i.y)) + bias)
    }),
    ("a bias first", |i| flat(i.y.clone().slice([0..1, 0..1]) + i.x.matmul(square(i.y)))),
    ("a layer and itself", |i| {
        let y = i.x.matmul(square(i.y));
        flat(y.clone() + y)
    }),
    ("a column for a bias", |i| flat(i.x.matmul(square(i.y.clone())) + i.y.sum_dim(2).slice([0..1]))),
    ("a layer of rows", |i| {
        let ([a, b, c], bias) = (i.x.dims(), i.y.clone().slice([0..1, 0..1]).reshape([1, i.x.dims()[2]]));
        let weight = square(i.y).reshape([c, c]);
        flat((i.x.reshape([a * b, c]).matmul(weight.clone()) + bias.clone()).matmul(weight.transpose()) + bias)
    }),
    ("a layer of one row", |i| {
        let bias = i.y.clone().slice([0..1, 0..1]);
        flat(i.x.slice([0..1, 0..1]).matmul(square(i.y)) + bias)
    }),
    ("a layer of four dimensions", |i| {
        let ([a, b, c], bias) = (i.x.dims(), i.y.clone().slice([0..1, 0..1]).reshape([1, 1, 1, i.x.dims()[2]]));
        let weight = square(i.y).reshape([1, 1, c, c]);
        let y = i.x.reshape([a, 1, b, c]).matmul(weight.clone());
        flat(y.clone() * 2.0) + flat(y + bias).exp()
    }),
    ("a residual of a layer", |i| {
        let bias = i.y.clone().slice([0..1, 0..1]);
        let x = i.x.clone() + i.x.matmul(square(i.y)) + bias;
        flat(norm(x)[0].clone())
    }),
];

/// With random numbers.
pub const DRAWN: &[Operation] = &[
    ("dropped weights", |i| {
        let [q, k, v] = qkv(&i);
        flat(dropout(masked(q.matmul(k.transpose()) * 0.3, hidden(&i, 1)), 0.3).matmul(v))
    }),
    ("almost all weights dropped", |i| {
        let [q, k, v] = qkv(&i);
        flat(dropout(softmax(q.matmul(k.transpose()) * 0.3, 3), 0.97).matmul(v))
    }),
    ("weights dropped twice", |i| {
        let [q, k, v] = qkv(&i);
        let weights = softmax(q.matmul(k.transpose()) * 0.3, 3);
        flat(dropout(dropout(weights.clone(), 0.3), 0.2).matmul(v.clone()))
            + flat(dropout(weights.clone(), 0.3).matmul(v.clone()))
            + flat(dropout(weights, 0.5).matmul(v).detach())
    }),
    ("dropped scores", |i| {
        let [q, k, v] = qkv(&i);
        flat(softmax(dropout(q.matmul(k.transpose()) * 0.3, 0.3), 3).matmul(v))
    }),
    ("one draw for all heads", |i| {
        let [q, k, v] = qkv(&i);
        let weights = softmax(q.matmul(k.transpose()) * 0.3, 3);
        let [a, _, b, _] = weights.dims();
        let kept = kept([a, 1, b, b], 0.7, &weights);
        flat((weights * kept / 0.7).matmul(v))
    }),
    ("a draw that is moved", |i| {
        let x = heads(i.x) + heads(i.y);
        let [a, h, b, c] = x.dims();
        let (one, other) = (kept([a, h, c, b], 0.7, &x), kept([b, a, h, c], 0.5, &x));
        flat(x.clone() * one.clone().swap_dims(2, 3))
            + flat(x * other.reshape([a, h, b, c]))
            + flat(one.sum_dim(3)).sum()
    }),
    ("paths dropped", |i| {
        let x = heads(i.x) * heads(i.y);
        let kept = kept([x.dims()[0], 1, 1, 1], 0.5, &x);
        flat(x.clone() * kept.clone() + x.slice([0..1]) * (kept.clone() + 1.0)) + flat(kept).sum()
    }),
    ("dropout before and after a norm", |i| {
        let [a, b, c] = i.x.dims();
        let [x, centered] = norm(dropout(heads(i.x), 0.3).reshape([a, b, c]) + i.y);
        flat(dropout(heads(x), 0.2)) + flat(heads(centered))
    }),
];
