//! Layers under test, as `nn` has them: convolutions and their transposes, pooling, norms, attention.

use crate::operations::{Operation, flat, pictures};
use burn::tensor::Tensor;
use burn::tensor::grid::affine_grid_2d;
use burn::tensor::module::{
    adaptive_avg_pool1d, adaptive_avg_pool3d, attention, avg_pool1d, avg_pool3d, batch_norm, batch_norm_train,
    conv_transpose1d, conv_transpose2d, conv_transpose3d, conv1d, conv2d, conv3d, deform_conv2d, interpolate,
    layer_norm, linear, max_pool1d, max_pool3d, unfold4d,
};
use burn::tensor::ops::{
    AttentionModuleOptions, AvgPoolOptions, ConvOptions, ConvTransposeOptions, DeformConvOptions, InterpolateMode,
    InterpolateOptions, MaxPoolOptions, UnfoldOptions,
};

fn volumes(x: Tensor<3>) -> Tensor<5> {
    let [a, b, c] = x.dims();
    x.reshape([a, b, c, 1, 1]).repeat_dim(3, 2).repeat_dim(4, 3)
}

pub const LAYERS: &[Operation] = &[
    ("linear layer", |i| {
        let c = i.x.dims()[2];
        let weight: Tensor<2> = i.y.clone().reshape([-1, c as i32]).swap_dims(0, 1);
        let bias = i.y.sum_dim(2);
        let n = weight.dims()[1];
        flat(linear(i.x, weight, Some(bias.reshape([n]))))
    }),
    ("grouped convolution", |i| {
        let [a, b, c] = i.x.dims();
        let filters = i.y.clone().sum_dim(0).reshape([b, 1, c, 1]);
        let bias = i.y.sum_dim(0).sum_dim(2).reshape([b]);
        let x = pictures(i.x.reshape([a, b, c]));
        flat(conv2d(x, filters, Some(bias), ConvOptions::new([1, 2], [c - 1, 1], [1, 1], b)))
    }),
    ("convolution of sequences", |i| {
        let filters = i.y.clone();
        let bias = i.y.sum_dim(1).sum_dim(2);
        let a = bias.dims()[0];
        flat(conv1d(i.x, filters, Some(bias.reshape([a])), ConvOptions::new([1], [1], [1], 1)))
    }),
    ("convolution of volumes", |i| {
        let (x, y) = (volumes(i.x), volumes(i.y));
        flat(conv3d(x, y, None, ConvOptions::new([1; 3], [0, 1, 1], [1; 3], 1)))
    }),
    ("transposed convolution", |i| {
        let b = i.x.dims()[1];
        // [in, out, ..]
        let filters = pictures(i.y.clone().swap_dims(0, 1));
        let out = filters.dims()[1];
        let bias = i.y.sum_dim(1).sum_dim(2).reshape([out]);
        assert_eq!(filters.dims()[0], b);
        flat(conv_transpose2d(
            pictures(i.x),
            filters,
            Some(bias),
            ConvTransposeOptions::new([2, 2], [1, 1], [1, 1], [1, 1], 1),
        ))
    }),
    ("transposed convolution in groups", |i| {
        let [_, b, c] = i.x.dims();
        let filters = i.y.sum_dim(0).reshape([b, 1, c, 1]);
        flat(conv_transpose2d(
            pictures(i.x),
            filters,
            None,
            ConvTransposeOptions::new([1, 1], [0, 0], [0, 0], [1, 1], b),
        ))
    }),
    ("transposed convolution of sequences", |i| {
        let filters = i.y.swap_dims(0, 1);
        flat(conv_transpose1d(i.x, filters, None, ConvTransposeOptions::new([2], [0], [0], [1], 1)))
    }),
    ("transposed convolution of volumes", |i| {
        let filters = volumes(i.y.swap_dims(0, 1));
        flat(conv_transpose3d(
            volumes(i.x),
            filters,
            None,
            ConvTransposeOptions::new([1; 3], [0; 3], [0; 3], [1; 3], 1),
        ))
    }),
    ("deformed convolution", |i| {
        let [a, b, c] = i.x.dims();
        let weight = pictures(i.y.clone()).slice([0..a, 0..b, 0..1, 0..1]);
        let offset = pictures(i.y.clone()).sum_dim(1).repeat_dim(1, 2) * 0.3;
        let mask = pictures(i.y).sum_dim(1);
        let options = DeformConvOptions::new([1, 1], [0, 0], [1, 1], 1, 1);
        flat(deform_conv2d(pictures(i.x.reshape([a, b, c])), offset, weight, Some(mask), None, options))
    }),
    ("other pooling", |i| {
        let x = volumes(i.x.clone());
        let of_volumes = flat(max_pool3d(x.clone(), MaxPoolOptions::new([1, 2, 2]))).sum()
            + flat(avg_pool3d(x.clone(), AvgPoolOptions::new([1, 1, 3]))).sum()
            + flat(adaptive_avg_pool3d(x, [1, 2, 1])).sum();
        let of_sequences = flat(max_pool1d(i.x.clone(), MaxPoolOptions::new([2]).with_stride([1])))
            + flat(avg_pool1d(i.x.clone(), AvgPoolOptions::new([2]).with_stride([1])));
        of_sequences + flat(adaptive_avg_pool1d(i.y, 1)).sum() + of_volumes
    }),
    ("resized", |i| {
        let nearest = InterpolateOptions::new(InterpolateMode::Nearest).with_output_size([3, 5]);
        let bilinear = InterpolateOptions::new(InterpolateMode::Bilinear).with_output_size([4, 2]);
        flat(interpolate(pictures(i.x.clone()), nearest)).sum() + flat(interpolate(pictures(i.x), bilinear))
    }),
    ("patches", |i| flat(unfold4d(pictures(i.x), [2, 2], UnfoldOptions::new([1, 1], [1, 0], [1, 1])))),
    ("sampled pictures", |i| {
        let [a, b, c] = i.x.dims();
        let theta = i.y.sum_dim(1).sum_dim(2).repeat_dim(1, 2).repeat_dim(2, 3) * 0.1;
        let grid = affine_grid_2d(theta, [a, b, c, 4]);
        flat(pictures(i.x).grid_sample_2d(grid, InterpolateMode::Bilinear))
    }),
    ("batch norm in training", |i| {
        let b = i.x.dims()[1];
        let gamma = i.y.clone().sum_dim(0).sum_dim(2).reshape([b]);
        let out = batch_norm_train(i.x, gamma.clone(), gamma, 1e-3);
        flat(out.output) + out.mean.sum() + out.variance.sum()
    }),
    ("batch norm", |i| {
        let b = i.x.dims()[1];
        let gamma = i.y.clone().sum_dim(0).sum_dim(2).reshape([b]);
        let variance = gamma.clone().abs() + 0.1;
        flat(batch_norm(i.x, gamma.clone(), gamma.clone(), gamma, variance, 1e-3))
    }),
    ("layer norm without bias", |i| {
        let last = i.x.dims()[2];
        let gamma = i.y.sum_dim(0).sum_dim(1).reshape([last]);
        flat(layer_norm(i.x, gamma, None, 1e-5))
    }),
    ("attention with a bias", |i| {
        let [a, b, c] = i.x.dims();
        let heads = |x: Tensor<3>| x.reshape([a, b, c / 2, 2]);
        let (q, k) = (heads(i.x), heads(i.y));
        let bias = k.clone().matmul(q.clone().swap_dims(2, 3));
        let mask = bias.clone().sum_dim(0).sum_dim(1).greater_elem(0.7).repeat_dim(1, b).repeat_dim(0, a);
        let mask = mask.clone().bool_and(mask.all_dim(3).bool_not());
        flat(attention(q, k.clone(), k, Some(mask), Some(bias), AttentionModuleOptions::default()))
    }),
    ("attention of groups", |i| {
        let [a, b, c] = i.x.dims();
        let q = i.x.reshape([a, b, c / 2, 2]).repeat_dim(1, 2);
        let k = i.y.reshape([a, b, c / 2, 2]);
        let options = AttentionModuleOptions { is_causal: true, scale: Some(0.4), ..Default::default() };
        flat(attention(q, k.clone(), k, None, None, options))
    }),
];
