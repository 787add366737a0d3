//! What sinks change of the softmax of keys: output, log-sum-exp, and their own gradient.

use burn::backend::{FloatDType, Scalar, Shape, TensorMetadata, tensor::FloatTensor as Float};

use super::kernels::{ContextKernels, OutputLse, slice};
use crate::dtype::cast;
use ranks::comm::Group;

/// Output `[s, b, h, dv]` and log-sum-exp `[b, h, s]` of keys, with the sinks `[h]` of these heads.
pub(crate) fn with_sinks<B: ContextKernels>([out, lse]: OutputLse<B>, sinks: Float<B>) -> OutputLse<B> {
    let (dtype, wide) = (out.dtype(), lse.dtype());
    let sinks = of_heads::<B>(&lse, sinks);
    let above = B::float_clamp_min(B::float_sub(lse.clone(), sinks.clone()), Scalar::Float(0.0));
    let top = B::float_add(sinks.clone(), above);
    let exp = |x: Float<B>| B::float_exp(B::float_sub(x, top.clone()));
    let total = B::float_log(B::float_add(exp(lse.clone()), exp(sinks)));
    let total = B::float_add(total, top.clone());
    let share = B::float_exp(B::float_sub(lse, total.clone()));
    let out = B::float_mul(cast::<B>(out, wide), by_position::<B>(share));
    [cast::<B>(out, dtype), total]
}

/// The gradient of the sinks `[h]` from the output and log-sum-exp with them, and the output's gradient.
pub(crate) fn sinks_grad<B: ContextKernels>([out, lse]: &OutputLse<B>, grad: &Float<B>, sinks: Float<B>) -> Float<B> {
    let (dtype, wide, heads) = (sinks.dtype(), lse.dtype(), sinks.shape()[0]);
    let p = B::float_exp(B::float_sub(of_heads::<B>(lse, sinks), lse.clone()));
    let products = B::float_mul(cast::<B>(out.clone(), wide), cast::<B>(grad.clone(), wide));
    let delta = B::float_mul(B::sum_dim(products, 3), by_position::<B>(p));
    let sum = B::sum_dim(B::sum_dim(delta, 1), 0);
    cast::<B>(B::float_neg(B::float_reshape(sum, Shape::from([heads]))), dtype)
}

/// `[h]` as `[b, h, s]` of the log-sum-exp `like`.
fn of_heads<B: ContextKernels>(like: &Float<B>, sinks: Float<B>) -> Float<B> {
    let heads = sinks.shape()[0];
    let sinks = B::float_reshape(cast::<B>(sinks, like.dtype()), Shape::from([1, heads, 1]));
    B::float_expand(sinks, like.shape())
}

/// `[b, h, s]` as `[s, b, h, 1]`.
fn by_position<B: ContextKernels>(x: Float<B>) -> Float<B> {
    let shape = x.shape();
    let x = B::float_reshape(x, Shape::from([shape[0], shape[1], shape[2], 1]));
    B::float_permute(x, &[2, 0, 1, 3])
}

/// The gradient of the sinks of all `sinks` heads, zero for heads of other ranks of the inner group, from the output and
/// log-sum-exp of this rank's heads; `grad` is that of the output after the all-to-all.
pub(super) fn grad_of_all_sinks<B: ContextKernels>(
    out_lse: &OutputLse<B>,
    grad: &Float<B>,
    sinks: Float<B>,
    inner: &Group,
) -> Float<B> {
    let own = sinks_grad::<B>(out_lse, grad, own_sinks::<B>(&sinks, inner));
    let zeros = || B::float_zeros(own.shape(), &own.device(), FloatDType::from(own.dtype()));
    match inner.size() {
        1 => own,
        ranks => {
            let part = |rank: usize| if rank == inner.rank() { own.clone() } else { zeros() };
            B::float_cat((0..ranks).map(part).collect(), 0)
        }
    }
}

/// The sinks of the heads that a rank of the inner group computes.
pub(super) fn own_sinks<B: ContextKernels>(sinks: &Float<B>, inner: &Group) -> Float<B> {
    let heads = sinks.shape()[0] / inner.size();
    slice::<B>(sinks.clone(), std::iter::once(inner.rank() * heads..(inner.rank() + 1) * heads))
}
