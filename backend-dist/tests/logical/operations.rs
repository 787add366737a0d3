//! The operations under test: functions of two float tensors, one index tensor and a dimension.

use burn::tensor::activation::{gelu, log_softmax, relu, sigmoid, softmax};
use burn::tensor::module::{
    adaptive_avg_pool2d, attention, avg_pool2d, conv2d, embedding, layer_norm, max_pool2d, max_pool2d_with_indices,
};
use burn::tensor::ops::{AttentionModuleOptions, AvgPoolOptions, ConvOptions, MaxPoolOptions};
use burn::tensor::{IndexingUpdateOp, Int, Tensor};

/// What an operation gets: `x` and `y` of shape `[a, b, c]`, `index` of the same shape with values below `a`, `b` and
/// `c`, and a dimension.
#[derive(Clone)]
pub struct Inputs {
    pub x: Tensor<3>,
    pub y: Tensor<3>,
    pub index: Tensor<3, Int>,
    pub dim: usize,
}

pub type Operation = (&'static str, fn(Inputs) -> Tensor<1>);

pub fn flat<const D: usize>(x: Tensor<D>) -> Tensor<1> {
    let len = x.dims().iter().product::<usize>();
    x.reshape([len])
}

pub fn number<const D: usize>(x: Tensor<D, Int>) -> Tensor<1> {
    flat(x.float())
}

/// A row of `index`.
pub fn few(i: &Inputs) -> Tensor<1, Int> {
    let last = i.index.dims()[2];
    i.index.clone().slice([0..1, 0..1, 0..last]).reshape([last])
}

/// Pictures of one channel more than they have samples.
pub fn pictures(x: Tensor<3>) -> Tensor<4> {
    let [a, b, c] = x.dims();
    x.reshape([a, b, c, 1]).repeat_dim(3, 4)
}

pub const OPERATIONS: &[Operation] = &[
    ("add", |i| flat(i.x + i.y)),
    ("sub", |i| flat(i.x - i.y)),
    ("mul", |i| flat(i.x * i.y)),
    ("div", |i| flat(i.x / (i.y.abs() + 1.0))),
    ("div by a sum", |i| flat(i.x.clone() / (i.y.abs().sum() + 1.0).reshape([1, 1, 1]))),
    ("times a scalar tensor", |i| flat(i.x * i.y.sum().reshape([1, 1, 1]))),
    ("broadcast along the dimension", |i| flat(i.x + i.y.sum_dim(i.dim))),
    ("scalars", |i| flat((((i.x * 3.0 + 1.0) / 2.0) - 0.5).neg())),
    ("other numbers", |i| {
        flat(i.x.clone() * 3.0 + i.x.clone() * 5.0 + i.y.clone().clamp_min(0.1) - i.y.clamp_min(0.2))
    }),
    ("powers", |i| flat(i.x.clone().powf_scalar(2.0) + i.x.abs().sqrt() + i.y.powi_scalar(3))),
    ("functions", |i| flat(i.x.clone().exp() + i.x.clone().tanh() + i.x.clone().erf() + i.x.abs().log1p())),
    ("activations", |i| flat(relu(i.x.clone()) + gelu(i.y.clone()) + sigmoid(i.x))),
    ("clamp", |i| flat(i.x.clamp(-0.3, 0.4))),
    ("comparison", |i| number(i.x.greater(i.y).int())),
    ("mask", |i| flat(i.x.clone().mask_fill(i.y.lower_elem(0.0), 7.0))),
    ("mask where", |i| flat(i.x.mask_where(i.index.equal_elem(0), i.y))),
    ("integers", |i| number((i.index.clone() + 2) * i.index)),
    ("divided integers", |i| number((i.index.clone() * 3).sum() / (i.index.max().zeros_like() + 2))),
    ("integers looked up", |i| {
        let of_rows = number(i.index.clone().gather(i.dim, i.index.zeros_like()));
        let selected = number(i.index.clone().select(i.dim, few(&i).zeros_like()));
        let of_greatest = number(i.x.clone().argmax(i.dim).select(i.dim, few(&i).zeros_like()));
        of_rows.sum() + selected.sum() + of_greatest.sum()
    }),
    ("matmul", |i| flat(i.x.matmul(i.y.swap_dims(1, 2)))),
    ("matmul of a shared matrix", |i| {
        let last = i.x.dims()[2];
        let shared = i.y.reshape([-1, last as i32]).swap_dims(0, 1);
        flat(i.x.matmul(shared.unsqueeze()))
    }),
    ("folded matmul", |i| {
        let last = i.x.dims()[2] as i32;
        flat(i.x.reshape([-1, last]).matmul(i.y.reshape([-1, last]).swap_dims(0, 1)))
    }),
    ("sum", |i| i.x.sum()),
    ("sum along", |i| flat(i.x.sum_dim(i.dim))),
    ("mean", |i| i.x.mean()),
    ("mean along", |i| flat(i.x.mean_dim(i.dim))),
    ("maximum", |i| i.x.max()),
    ("maximum along", |i| flat(i.x.max_dim(i.dim))),
    ("where the maximum is", |i| number(i.x.argmax(i.dim))),
    ("maximum and where", |i| {
        let (values, indices) = i.x.max_dim_with_indices(i.dim);
        flat(values) + number(indices)
    }),
    ("multiplied along", |i| flat(i.x.prod_dim(i.dim))),
    ("sorted", |i| flat(i.x.sort(i.dim))),
    ("top", |i| flat(i.x.topk(1, i.dim))),
    ("cumulative sum", |i| flat(i.x.cumsum(i.dim))),
    ("logic", |i| number(i.x.greater_elem(0.0).any_dim(i.dim).int()) + number(i.y.greater_elem(0.0).all().int())),
    ("transposition", |i| flat(i.x.swap_dims(0, i.dim))),
    ("permutation", |i| flat(i.x.permute([2, 0, 1]))),
    ("reshape to two", |i| {
        let [a, b, c] = i.x.dims();
        flat(i.x.reshape([a * b, c]).matmul(i.y.reshape([c, a * b])))
    }),
    ("split of the last", |i| {
        let [a, b, c] = i.x.dims();
        flat(i.x.reshape([a, b, c / 2, 2]).swap_dims(1, 2).reshape([a, c / 2 * b, 2]))
    }),
    ("merged and split again", |i| {
        let [a, b, c] = i.x.dims();
        let (x, y) = (i.x.reshape([a * b, c]), i.y.reshape([a * b, c]));
        flat((x * 2.0 + y.clone().exp()).swap_dims(0, 1).swap_dims(0, 1).reshape([a, b, c])) + y.sum()
    }),
    ("reduced after a merge", |i| {
        let [a, b, c] = i.x.dims();
        let x = i.x.reshape([a, b * c]);
        flat(x.clone().sum_dim(1) + x.clone().mean_dim(1) + x.max_dim(1)) + i.y.reshape([a * b, c]).sum_dim(0).sum()
    }),
    ("matmul after a merge", |i| {
        let [a, b, c] = i.x.dims();
        let (x, y) = (i.x.reshape([a * b, c]), i.y.reshape([a * b, c]));
        flat(x.clone().swap_dims(0, 1).matmul(y.clone())) + x.matmul(y.swap_dims(0, 1)).sum()
    }),
    ("indexed after a merge", |i| {
        let [a, b, c] = i.x.dims();
        let index = i.index.reshape([a * b, c]);
        flat(i.x.reshape([a * b, c]).gather(1, index.clone().slice([0..a * b, 0..1]).mul_scalar(0)))
            + number(index).sum()
    }),
    ("a tensor and its transposition", |i| {
        let x = i.x.reshape([-1, 2]);
        flat(x.clone().swap_dims(0, 1).matmul(x.clone())) + x.clone().matmul(x.swap_dims(0, 1)).sum()
    }),
    ("flip", |i| flat(i.x.flip([i.dim]))),
    ("expand", |i| {
        let [a, b, c] = i.x.dims();
        flat(i.x.reshape([1, a, b, c]).expand([3, a, b, c]))
    }),
    ("slice", |i| {
        let [a, b, c] = i.x.dims();
        flat(i.x.slice([0..a, 0..b, 1..c]))
    }),
    ("parts taken", |i| {
        let parts = i.x.clone().split(i.x.dims()[i.dim].div_ceil(2), i.dim).into_iter();
        Tensor::cat(parts.map(|part| flat(part.clone() * part)).collect(), 0)
    }),
    ("a part taken and put back", |i| {
        let (n, mut ranges) = (i.x.dims()[i.dim], i.x.dims().map(|n| 0..n));
        ranges[i.dim] = n / 2..n / 2 + (n / 4).max(1);
        let part = i.x.clone().slice(ranges.clone()).exp();
        flat(i.x.zeros_like().slice_assign(ranges.clone(), part.clone()) * i.y.clone() + i.y.slice_assign(ranges, part))
    }),
    ("slice assign", |i| {
        let [a, b, _] = i.x.dims();
        let value = i.y.slice([0..a, 0..b, 0..1]);
        flat(i.x.slice_assign([0..a, 0..b, 1..2], value))
    }),
    ("concatenation", |i| flat(Tensor::cat(vec![i.x, i.y], i.dim))),
    ("repetition", |i| flat(i.x.repeat_dim(i.dim, 2))),
    ("softmax", |i| flat(softmax(i.x, i.dim))),
    ("logarithm of softmax", |i| flat(log_softmax(i.x, i.dim))),
    ("layer norm", |i| {
        let last = i.x.dims()[2];
        let gamma = i.y.sum_dim(0).sum_dim(1).reshape([last]);
        flat(layer_norm(i.x, gamma.clone(), Some(gamma), 1e-5))
    }),
    ("gather", |i| flat(i.x.gather(i.dim, i.index))),
    ("scatter", |i| flat(i.x.scatter(i.dim, i.index, i.y, IndexingUpdateOp::Add))),
    ("select", |i| {
        let index = few(&i);
        flat(i.x.select(i.dim, index))
    }),
    ("select assign", |i| {
        let index = few(&i);
        let value = i.y.select(i.dim, index.clone());
        flat(i.x.select_assign(i.dim, index, value, IndexingUpdateOp::Add))
    }),
    ("embedding", |i| {
        let [a, b, c] = i.x.dims();
        flat(embedding(i.x.reshape([a * b, c]), i.index.reshape([a, b * c])))
    }),
    ("convolution", |i| {
        let [a, b, c] = i.x.dims();
        let filters = i.y.clone().reshape([a, b, c, 1]);
        let bias = i.y.sum_dim(1).sum_dim(2).reshape([a]);
        let options = ConvOptions::new([1, 1], [c, 0], [1, 1], 1);
        flat(conv2d(pictures(i.x), filters, Some(bias), options))
    }),
    ("pooling", |i| {
        let (x, y) = (pictures(i.x), pictures(i.y));
        let average = avg_pool2d(x.clone(), AvgPoolOptions::new([1, 2]));
        let most = max_pool2d(x, MaxPoolOptions::new([1, 2]));
        flat(average + most) + adaptive_avg_pool2d(y, [1, 1]).sum()
    }),
    ("attention", |i| {
        let [a, b, c] = i.x.dims();
        let heads = |x: Tensor<3>| x.reshape([a, b, c / 2, 2]);
        let (q, k) = (heads(i.x), heads(i.y));
        flat(attention(q, k.clone(), k, None, None, AttentionModuleOptions::default()))
    }),
    ("where the pooled maximum is", |i| {
        let (values, indices) = max_pool2d_with_indices(pictures(i.x), MaxPoolOptions::new([1, 2]));
        flat(values) + number(indices)
    }),
];
