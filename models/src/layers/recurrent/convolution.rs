//! The causal depthwise convolution in front of a linear recurrence.

use burn::tensor::Tensor;

use super::borders::Borders;

/// Every feature is a weighted sum of its last `kernel` values: `x [s, b, features]`, `weight [features, 1, kernel]` with
/// the current position last. `before [kernel - 1, b, features]` comes in front of the sequence; without it zeros do.
/// Values of other documents are zeros too.
///
/// Also returns what comes in front of the positions that follow.
pub(in crate::layers) fn convolve(
    x: Tensor<3>,
    weight: Tensor<3>,
    before: Option<Tensor<3>>,
    borders: Option<&Borders>,
) -> (Tensor<3>, Tensor<3>) {
    let ([seq, samples, features], [_, _, kernel]) = (x.dims(), weight.dims());
    let before = before.unwrap_or_else(|| Tensor::zeros([kernel - 1, samples, features], (&x.device(), x.dtype())));
    let all = Tensor::cat(vec![before, x], 0);
    let summand = |tap: usize| {
        let weight = weight.clone().narrow(2, tap, 1).reshape([1, 1, features]);
        let seen = all.clone().narrow(0, tap, seq) * weight;
        match borders.filter(|_| tap + 1 < kernel) {
            Some(borders) => seen * borders.reaches(kernel - 1 - tap, &all),
            None => seen,
        }
    };
    let sum = (1..kernel).fold(summand(0), |sum, tap| sum + summand(tap));
    (sum, all.narrow(0, seq, kernel - 1))
}
