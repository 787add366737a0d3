//! The products of groups of rows by themselves, without autodiff, on CUDA devices: for measurements. Models take
//! [`grouped_linear`](super::moe::grouped_linear).

use burn::backend::Cube;
use burn::tensor::Tensor;
use burn_cubecl::tensor::CubeTensor;

use super::cuda::grouped as products;

/// How the products of groups are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// One launch for all groups; on Hopper, 16-bit numbers, groups of multiples of 128 rows.
    Kernel,
    /// A cuBLASLt product for each group.
    Loop,
}

/// `x_g · w_gᵀ` for the `counts[g]` rows of each group `g` of `x [rows, in]`; `w [groups · out, in]`.
///
/// # Panics
/// If a tensor is not on a CUDA device, sizes do not fit, or the way that is asked for does not exist.
pub fn forward(x: Tensor<2>, w: Tensor<2>, counts: &[usize], way: Option<Way>) -> Tensor<2> {
    Tensor::from_primitive::<Cube>(products::forward(primitive(x), primitive(w), counts, way))
}

/// `gradient_g · w_g` of each group: the gradient of [`forward`] in `x`.
///
/// # Panics
/// As [`forward`].
pub fn input_gradient(gradient: Tensor<2>, w: Tensor<2>, counts: &[usize], way: Option<Way>) -> Tensor<2> {
    Tensor::from_primitive::<Cube>(products::input_grad(primitive(gradient), primitive(w), counts, way))
}

/// `gradient_gᵀ · x_g` of each group: the gradient of [`forward`] in `w`.
///
/// # Panics
/// As [`forward`].
pub fn weight_gradient(gradient: Tensor<2>, x: Tensor<2>, counts: &[usize], way: Option<Way>) -> Tensor<2> {
    Tensor::from_primitive::<Cube>(products::weight_grad(primitive(gradient), primitive(x), counts, way))
}

/// [`weight_gradient`] written to the f32 elements of `sum`, or added to them, where they lie.
///
/// # Panics
/// As [`forward`].
pub fn accumulate_weight_gradient(
    gradient: Tensor<2>,
    x: Tensor<2>,
    counts: &[usize],
    sum: &Tensor<2>,
    add: bool,
    way: Option<Way>,
) {
    let sum = primitive(sum.clone());
    products::accumulate_weight_grad(primitive(gradient), primitive(x), counts, &sum, add, way);
}

fn primitive(x: Tensor<2>) -> CubeTensor {
    x.try_into_primitive::<Cube>().expect("a tensor on a CUDA device")
}
