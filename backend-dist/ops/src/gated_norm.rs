//! RMSNorm of a gated value, as one autograd node.

use burn::backend::{Backend, Flex, tensor::FloatTensor};
use burn::tensor::Tensor;

use super::{
    kernels::LocalKernels,
    operation::{apply, operation},
    plain,
};

/// `w u / √(mean(u²) + eps)` with `u = x silu(gate)` for `x` and `gate [s, b, features]`, whose mean is over each of
/// `groups` groups of neighbouring features; `w [features]`.
///
/// # Panics
///
/// If the sizes do not fit.
pub fn gated_rms_norm(x: Tensor<3>, gate: Tensor<3>, w: Tensor<1>, groups: usize, eps: f64) -> Tensor<3> {
    let ([.., features], [size]) = (x.dims(), w.dims());
    let fits = x.dims() == gate.dims() && size == features && groups > 0 && features.is_multiple_of(groups);
    assert!(fits, "gated_rms_norm: {:?} gated by {:?}, {groups} groups, {size} weights", x.dims(), gate.dims());
    apply(Gated { norm: GatedNorm { groups, eps } }, [x.into_dispatch(), gate.into_dispatch(), w.into_dispatch()])
}

/// The groups and the epsilon.
#[derive(Clone, Copy, Debug)]
pub struct GatedNorm {
    /// Groups of features.
    pub groups: usize,
    /// Epsilon.
    pub eps: f64,
}

/// The tensors of [`gated_rms_norm`].
#[derive(Clone, Debug)]
pub struct GatedInputs<B: Backend> {
    /// `[s, b, features]`.
    pub x: FloatTensor<B>,
    /// `[s, b, features]`.
    pub gate: FloatTensor<B>,
    /// `[features]`.
    pub w: FloatTensor<B>,
}

/// The kernels of [`gated_rms_norm`]; the default bodies are the formulas.
pub trait GatedNormKernels: LocalKernels {
    /// See [`gated_rms_norm`].
    fn gated_norm(inputs: GatedInputs<Self>, norm: GatedNorm) -> FloatTensor<Self> {
        plain::gated_norm::forward::<Self>(inputs, norm)
    }

    /// The gradients of x, of the gate, and of the weight.
    fn gated_norm_grads(inputs: GatedInputs<Self>, grad: FloatTensor<Self>, norm: GatedNorm) -> [FloatTensor<Self>; 3] {
        plain::gated_norm::grads::<Self>(inputs, grad, norm)
    }
}

impl GatedNormKernels for Flex {}

operation! {
    Gated { norm: GatedNorm }, 3, (GatedInputs<B>, GatedNorm),
    |[x, gate, w], _, tracked| {
        let inputs = GatedInputs { x, gate, w };
        let saved = tracked.then(|| (inputs.clone(), norm));
        (B::gated_norm(inputs, norm), saved)
    },
    |(inputs, norm), grad, parents| parents.deliver::<B>(B::gated_norm_grads(inputs, grad, norm)),
}

#[cfg(test)]
mod tests {
    use burn::tensor::activation::silu;
    use burn::tensor::{DType, Device, Distribution};

    use super::*;

    /// Values and gradients are those of separate operations.
    #[test]
    fn groups_are_gated_and_normalised() {
        let on = (&Device::flex().autodiff(), DType::F64);
        for groups in [1, 3] {
            let random = |shape: [usize; 3]| Tensor::<3>::random(shape, Distribution::Default, on);
            let [x, gate] = [(); 2].map(|()| random([4, 2, 12]).require_grad());
            let w = random([1, 1, 12]).reshape([12]).require_grad();
            let slope = random([4, 2, 12]);
            let found = gated_rms_norm(x.clone(), gate.clone(), w.clone(), groups, 1e-5);
            let value = (x.clone() * silu(gate.clone())).reshape([4, 2, groups, 12 / groups]);
            let mean = (value.clone() * value.clone()).mean_dim(3);
            let normed: Tensor<3> = (value / mean.add_scalar(1e-5).sqrt()).reshape([4, 2, 12]);
            let expected = normed * w.clone().unsqueeze();
            let [a, b] = [&found, &expected].map(|y| (y.clone() * slope.clone()).sum().backward());
            let pairs = [
                (found.into_data(), expected.into_data()),
                (x.grad(&a).unwrap().into_data(), x.grad(&b).unwrap().into_data()),
                (gate.grad(&a).unwrap().into_data(), gate.grad(&b).unwrap().into_data()),
                (w.grad(&a).unwrap().into_data(), w.grad(&b).unwrap().into_data()),
            ];
            for (found, expected) in pairs {
                for (a, b) in found.iter::<f64>().zip(expected.iter::<f64>()) {
                    assert!((a - b).abs() <= 1e-12, "{groups} groups: {a} instead of {b}");
                }
            }
        }
    }
}
