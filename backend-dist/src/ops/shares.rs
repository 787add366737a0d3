//! Shares of rows, and softmax, which is the shares of exponentials.

use burn::backend::{
    Autodiff, Backend, Dispatch, Flex, Scalar, TensorMetadata,
    autodiff::{
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    backend_extension,
    tensor::FloatTensor,
};
use burn::tensor::Tensor;

use super::kernels::LocalKernels;

/// `x / (Σ x + least)` with sums over the last dimension.
pub fn shares<const D: usize>(x: Tensor<D>, least: f64) -> Tensor<D> {
    of(x, Of::Numbers { least })
}

/// Softmax over the last dimension.
pub fn softmax<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    of(x, Of::Exponentials)
}

fn of<const D: usize>(x: Tensor<D>, of: Of) -> Tensor<D> {
    Tensor::from_dispatch(<Dispatch as ShareOps>::op_shares(x.into_dispatch(), of))
}

/// What shares are taken of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Of {
    /// The numbers as they are; `least` is added to their sum.
    Numbers {
        /// Keeps the sum from zero.
        least: f64,
    },
    /// `exp(x - max x)`.
    Exponentials,
}

/// What a backend computes for [`shares`] and [`softmax`].
pub trait ShareKernels: LocalKernels {
    /// The shares and what they are shares of, in the last dimension one number.
    fn shares(x: FloatTensor<Self>, of: Of) -> [FloatTensor<Self>; 2] {
        plain_shares::<Self>(x, of)
    }

    /// The gradient of `x` from what [`shares`](Self::shares) gave.
    fn shares_grad(kept: [FloatTensor<Self>; 2], grad: FloatTensor<Self>, of: Of) -> FloatTensor<Self> {
        plain_grad::<Self>(kept, grad, of)
    }
}

impl ShareKernels for Flex {}

fn last(x: &impl TensorMetadata) -> usize {
    x.shape().num_dims() - 1
}

pub fn plain_shares<B: LocalKernels>(x: FloatTensor<B>, of: Of) -> [FloatTensor<B>; 2] {
    let dim = last(&x);
    let (x, least) = match of {
        Of::Numbers { least } => (x, least),
        Of::Exponentials => (B::float_exp(B::float_sub(x.clone(), B::float_max_dim(x, dim))), 0.0),
    };
    let total = B::float_add_scalar(B::sum_dim(x.clone(), dim), Scalar::Float(least));
    [B::float_div(x, total.clone()), total]
}

/// With `y = x / t`: `dx = (dy - Σ dy y) / t`, and with `x = exp z`: `dz = (dy - Σ dy y) y`.
pub fn plain_grad<B: LocalKernels>([y, total]: [FloatTensor<B>; 2], grad: FloatTensor<B>, of: Of) -> FloatTensor<B> {
    let dim = last(&y);
    let along = B::sum_dim(B::float_mul(grad.clone(), y.clone()), dim);
    let slope = B::float_sub(grad, along);
    match of {
        Of::Numbers { .. } => B::float_div(slope, total),
        Of::Exponentials => B::float_mul(slope, y),
    }
}

#[backend_extension(Flex, Cube: cfg(feature = "cuda"), Autodiff)]
pub(super) trait ShareOps: Backend {
    fn op_shares(x: FloatTensor<Self>, of: Of) -> FloatTensor<Self>;
}

macro_rules! share_ops {
    ($backend:ty) => {
        impl ShareOps for $backend {
            fn op_shares(x: FloatTensor<Self>, of: Of) -> FloatTensor<Self> {
                let [y, _] = Self::shares(x, of);
                y
            }
        }
    };
}

share_ops!(Flex);
#[cfg(feature = "cuda")]
share_ops!(burn::backend::Cube);

#[derive(Debug)]
struct Shares;

impl<B: ShareKernels> Backward<B, 1> for Shares {
    type State = ([FloatTensor<B>; 2], Of);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let (grad, (kept, of)) = (grads.consume::<B>(&ops.node), ops.state);
        if let [Some(node)] = ops.parents {
            grads.register::<B>(node.id, B::shares_grad(kept, grad, of));
        }
    }
}

impl<B: ShareKernels, C: CheckpointStrategy> ShareOps for Autodiff<B, C> {
    fn op_shares(x: FloatTensor<Self>, of: Of) -> FloatTensor<Self> {
        let (x, node) = x.into_parts();
        let [y, total] = B::shares(x, of);
        match Shares.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(([y.clone(), total], of), y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }
}
