//! RMSNorm of the query heads and of the key heads of a packed projection, with separate weights, as one autograd node.
//! Separate operations would slice the projection, copy it, and concatenate its gradient.

use burn::backend::{Backend, Flex, tensor::FloatTensor};
use burn::tensor::{Slice, Tensor};

use super::{
    kernels::{LocalKernels, NormGrads, NormNeeds},
    operation::{apply, operation},
    options::{PackedHeads, Rms},
};

/// `w x / √(mean(x²) + eps)`, or with `1 + w` ([`Rms`]), over the features of every query and key head of `qkv [s, b, heads + 2 kv_heads, d]`, with
/// the first of `weights [d]` for queries and the second for keys; values are unchanged.
///
/// # Panics
///
/// If heads or weights do not fit `qkv`.
pub fn norm_heads(qkv: Tensor<4>, weights: [Tensor<1>; 2], rms: impl Into<Rms>, heads: PackedHeads) -> Tensor<4> {
    let [.., all, features] = qkv.dims();
    assert_eq!(all, heads.total(), "norm_heads: {all} heads are not {heads:?}");
    for weight in &weights {
        assert_eq!(weight.dims(), [features], "norm_heads: the weight does not fit heads of {features} features");
    }
    let [queries, keys] = weights.map(Tensor::into_dispatch);
    apply(Norms { norms: HeadNorms { heads, rms: rms.into() } }, [qkv.into_dispatch(), queries, keys])
}

/// Which heads are normalised, and the epsilon.
#[derive(Clone, Copy, Debug)]
pub struct HeadNorms {
    /// The packed heads.
    pub heads: PackedHeads,
    /// Both norms.
    pub rms: Rms,
}

/// The kernels of [`norm_heads`]; the default bodies slice the projection.
pub trait HeadNormKernels: LocalKernels {
    /// See [`norm_heads`].
    fn norm_heads(qkv: FloatTensor<Self>, weights: [FloatTensor<Self>; 2], norms: HeadNorms) -> FloatTensor<Self> {
        forward_unfused::<Self>(qkv, weights, norms)
    }

    /// The gradients of `qkv` and of the weights.
    fn norm_heads_grads(
        qkv: FloatTensor<Self>,
        weights: [FloatTensor<Self>; 2],
        grad: FloatTensor<Self>,
        norms: HeadNorms,
    ) -> [FloatTensor<Self>; 3] {
        grads_unfused::<Self>(qkv, weights, grad, norms)
    }
}

impl HeadNormKernels for Flex {}

/// Queries, keys and values.
fn split_heads<B: Backend>(qkv: FloatTensor<B>, PackedHeads { heads, kv_heads }: PackedHeads) -> [FloatTensor<B>; 3] {
    let part = |heads: std::ops::Range<usize>| {
        let slices = [Slice::full(), Slice::full(), Slice::from(heads), Slice::full()];
        B::float_slice(qkv.clone(), &slices)
    };
    [part(0..heads), part(heads..heads + kv_heads), part(heads + kv_heads..heads + 2 * kv_heads)]
}

pub fn forward_unfused<B: LocalKernels>(
    qkv: FloatTensor<B>,
    [of_queries, of_keys]: [FloatTensor<B>; 2],
    HeadNorms { heads, rms }: HeadNorms,
) -> FloatTensor<B> {
    let [queries, keys, values] = split_heads::<B>(qkv, heads);
    let (queries, keys) = (B::rms_norm_forward(queries, of_queries, rms), B::rms_norm_forward(keys, of_keys, rms));
    B::float_cat(vec![queries, keys, values], 2)
}

pub fn grads_unfused<B: LocalKernels>(
    qkv: FloatTensor<B>,
    [of_queries, of_keys]: [FloatTensor<B>; 2],
    grad: FloatTensor<B>,
    HeadNorms { heads, rms }: HeadNorms,
) -> [FloatTensor<B>; 3] {
    let ([queries, keys, _], [of_q, of_k, of_v]) = (split_heads::<B>(qkv, heads), split_heads::<B>(grad, heads));
    let both = |x, w, grad| {
        let NormGrads { x, w, .. } = B::rms_norm_grads(x, w, grad, rms, NormNeeds { x: true, w: true, b: false });
        (x.expect("it was asked for"), w.expect("it was asked for"))
    };
    let ((queries, q), (keys, k)) = (both(queries, of_queries, of_q), both(keys, of_keys, of_k));
    [B::float_cat(vec![queries, keys, of_v], 2), q, k]
}

operation! {
    Norms { norms: HeadNorms }, 3, ([FloatTensor<B>; 3], HeadNorms),
    |[qkv, queries, keys], _, tracked| {
        let saved = tracked.then(|| ([qkv.clone(), queries.clone(), keys.clone()], norms));
        (B::norm_heads(qkv, [queries, keys], norms), saved)
    },
    |([qkv, queries, keys], norms), grad, parents| {
        parents.deliver::<B>(B::norm_heads_grads(qkv, [queries, keys], grad, norms));
    },
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device, Distribution};

    use super::*;
    use crate::rms_norm;

    /// Values and gradients are those of separate operations, bit for bit.
    #[test]
    fn heads_are_normalised_as_separate_ones() {
        let device = Device::flex().autodiff();
        for dtype in [DType::F64, DType::F32, DType::BF16] {
            let random = |shape: [usize; 4]| Tensor::<4>::random(shape, Distribution::Default, (&device, dtype));
            let (qkv, slope) = (random([3, 2, 8, 6]).require_grad(), random([3, 2, 8, 6]));
            let weights = [(); 2].map(|()| random([1, 1, 1, 6]).reshape([6]).require_grad());
            let heads = PackedHeads { heads: 4, kv_heads: 2 };
            let part = |first, count| qkv.clone().narrow(2, first, count);
            let apart = Tensor::cat(
                vec![
                    rms_norm(part(0, 4), weights[0].clone(), 1e-5),
                    rms_norm(part(4, 2), weights[1].clone(), 1e-5),
                    part(6, 2),
                ],
                2,
            );
            let whole = norm_heads(qkv.clone(), weights.clone(), 1e-5, heads);
            whole.to_data().assert_eq(&apart.to_data(), true);
            let [found, expected] = [whole, apart].map(|y| (y * slope.clone()).sum().backward());
            let gradient = |of: &Tensor<1>, from| of.grad(from).expect("it takes part").into_data();
            for weight in &weights {
                gradient(weight, &found).assert_eq(&gradient(weight, &expected), true);
            }
            let gradient = |from| qkv.grad(from).expect("it takes part").into_data();
            gradient(&found).assert_eq(&gradient(&expected), true);
        }
    }
}
