//! The causal depthwise convolution in front of a linear recurrence, for sequences that are read in several steps too.

use backend_dist::ops::causal_convolution;
use burn::tensor::Tensor;

use super::borders::Borders;

/// Every feature of `x [s, b, features]` as [`causal_convolution`] has it, with `weight [features, 1, kernel]`, PyTorch's shape. `before
/// [kernel - 1, b, features]` comes in front of the sequence; without it zeros do.
pub(in crate::layers) fn convolve(
    x: Tensor<3>,
    weight: Tensor<3>,
    bias: Option<Tensor<1>>,
    before: Option<Tensor<3>>,
    borders: Option<&Borders>,
) -> Tensor<3> {
    let weight = weight.squeeze_dim::<2>(1);
    let Some(before) = before else {
        let ages = borders.map(|borders| borders.ages(&x.device()));
        return causal_convolution(x, weight, bias, ages);
    };
    let ([seen, ..], [seq, ..]) = (before.dims(), x.dims());
    let before = before.cast(x.dtype());
    causal_convolution(Tensor::cat(vec![before, x], 0), weight, bias, None).narrow(0, seen, seq)
}

/// What comes in front of the positions behind `x` in a convolution of `kernel` positions.
pub(in crate::layers) fn tail(x: Tensor<3>, before: Option<Tensor<3>>, kernel: usize) -> Tensor<3> {
    let ([seq, samples, features], kept) = (x.dims(), kernel - 1);
    let before = before.unwrap_or_else(|| Tensor::zeros([kept, samples, features], (&x.device(), x.dtype())));
    // A part of all of `x` may be a view, which would keep a whole prompt.
    let own = seq.min(kept);
    let end = x.clone().narrow(0, seq - own, own);
    Tensor::cat(vec![before.cast(x.dtype()), end], 0).narrow(0, own, kept)
}
