//! The loss of predicting tokens.

use burn::tensor::activation::log_softmax;
use burn::tensor::{Int, Tensor};

use super::single::at_least_single;
use crate::hf::IGNORED;

/// The mean cross-entropy of `logits [batch, sequence, classes]` over the `labels [batch, sequence]` that are not
/// -100, in at least single precision. It is NaN if none counts.
pub fn cross_entropy(logits: Tensor<3>, labels: Tensor<2, Int>) -> Tensor<1> {
    let ignored = labels.clone().equal_elem(IGNORED);
    let targets = labels.mask_fill(ignored.clone(), 0).unsqueeze_dim::<3>(2);
    let losses = log_softmax(at_least_single(logits), 2).gather(2, targets).squeeze_dim::<2>(2).neg();
    let dtype = losses.dtype();
    let counted = ignored.clone().bool_not().int().sum().float().cast(dtype);
    losses.mask_fill(ignored, 0.0).sum() / counted
}
