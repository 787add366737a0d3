//! Grouped GEMMs alone, without autodiff, on CUDA devices: for measurements. Models use
//! [`grouped_linear`](super::moe::grouped_linear).

use burn::backend::Cube;
use burn::tensor::Tensor;
use burn_cubecl::tensor::CubeTensor;

pub use super::cuda::grouped::Method;

use super::cuda::grouped as gemms;
use super::moe::TokenGroups;

/// `x_g · w_gᵀ` for the `counts[g]` tokens of each group `g` of `x [tokens, in]`; `w [groups · out, in]`.
///
/// # Panics
/// If a tensor is not on a CUDA device, sizes do not fit, or the requested method is not available.
pub fn forward(x: Tensor<2>, w: Tensor<2>, counts: &[usize], method: Option<Method>) -> Tensor<2> {
    Tensor::from_primitive::<Cube>(gemms::forward(primitive(x), primitive(w), TokenGroups::alone(counts), None, method))
}

/// [`forward`] plus the `bias [groups · out]` of each token's group times the token's factor, of `factors [tokens]` of
/// f32.
pub fn biased_forward(
    x: Tensor<2>,
    w: Tensor<2>,
    [bias, factors]: [Tensor<1>; 2],
    counts: &[usize],
    method: Option<Method>,
) -> Tensor<2> {
    let [bias, factors] = [primitive(bias), primitive(factors)];
    let groups = TokenGroups::alone(counts);
    Tensor::from_primitive::<Cube>(gemms::forward(primitive(x), primitive(w), groups, Some([&bias, &factors]), method))
}

/// `gradient_g · w_g` of each group: the gradient of [`forward`] in `x`.
pub fn input_gradient(gradient: Tensor<2>, w: Tensor<2>, counts: &[usize], method: Option<Method>) -> Tensor<2> {
    Tensor::from_primitive::<Cube>(gemms::input_grad(
        primitive(gradient),
        primitive(w),
        TokenGroups::alone(counts),
        method,
    ))
}

/// `gradient_gᵀ · x_g` of each group: the gradient of [`forward`] in `w`.
pub fn weight_gradient(gradient: Tensor<2>, x: Tensor<2>, counts: &[usize], method: Option<Method>) -> Tensor<2> {
    Tensor::from_primitive::<Cube>(gemms::weight_grad(
        primitive(gradient),
        primitive(x),
        TokenGroups::alone(counts),
        method,
    ))
}

/// [`weight_gradient`] written to the f32 elements of `sum` in place, or added to them.
pub fn accumulate_weight_gradient(
    gradient: Tensor<2>,
    x: Tensor<2>,
    counts: &[usize],
    sum: &Tensor<2>,
    add: bool,
    method: Option<Method>,
) {
    let sum = primitive(sum.clone());
    gemms::accumulate_weight_grad(primitive(gradient), primitive(x), TokenGroups::alone(counts), &sum, add, method);
}

fn primitive<const D: usize>(x: Tensor<D>) -> CubeTensor {
    x.try_into_primitive::<Cube>().expect("a tensor on a CUDA device")
}
