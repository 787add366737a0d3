//! The residual stream of a block, where norms read it and what is made of them is added to it.
//!
//! The sum in front of a norm and the norm are one pass over memory, and so are the norm's gradient and the sum with
//! the gradient that has come past the norm. A node of Burn's graph has one output and registers its gradients by
//! itself, so that two things go from operation to operation in a [`Joint`], beside the tensor.

mod joint;
pub(super) mod kernels;
mod node;

use burn::backend::Dispatch;
use burn::tensor::{DType, Tensor};

pub(super) use joint::Joint;
pub(super) use kernels::ResidualKernels;

use super::{
    extras::Extras,
    fused::{LinearOptions, linear_of},
    prologue::{Prologue, Step},
};
use joint::Sum;
use node::ResidualOps;

/// The residual stream at one place, `[s, b, hidden]`: what norms read there and what is added goes through this.
///
/// All values and gradients are those of the separate operations, bit for bit where a backend has no kernels of its own
/// for this. A tensor that nothing is added to becomes one by `into`.
#[derive(Clone, Debug)]
pub struct Residual {
    x: Tensor<3>,
    joint: Joint,
}

impl From<Tensor<3>> for Residual {
    fn from(x: Tensor<3>) -> Self {
        Self { x, joint: Joint::default() }
    }
}

impl Residual {
    /// The stream where it enters a block. The gradients of the block's operations meet here, not at `x`: of a leaf no
    /// gradient could be taken out again.
    pub fn enter(x: Tensor<3>) -> Self {
        Tensor::from_dispatch(<Dispatch as ResidualOps>::op_enter(x.into_dispatch())).into()
    }

    /// The stream's value, for everything but norms and sums.
    pub fn value(&self) -> Tensor<3> {
        self.x.clone()
    }

    /// The type of the stream's elements.
    pub fn dtype(&self) -> DType {
        self.x.dtype()
    }

    /// The stream plus `other`, where `norm` is what reads the sum next; [`Prologue::None`] if that is no norm.
    ///
    /// # Panics
    ///
    /// If `other` has another shape, or `norm` does not fit or is no norm.
    pub fn plus(self, other: Tensor<3>, norm: Prologue) -> Self {
        let shape = self.x.dims();
        assert_eq!(shape, other.dims(), "residual: the stream is {shape:?}, what is added {:?}", other.dims());
        let (step, params) = norm.apart("residual", &shape);
        assert!(step.is_norm() || matches!(step, Step::None), "residual: {step:?} is no norm");
        let joint = Joint::default();
        let sum = Sum { of: self.joint, step, to: joint.clone() };
        let (x, other) = (self.x.into_dispatch(), other.into_dispatch());
        let x = <Dispatch as ResidualOps>::op_sum(x, other, Extras::of(params), sum);
        Self { x: Tensor::from_dispatch(x), joint }
    }

    /// The stream plus `other`, where it leaves the block.
    ///
    /// # Panics
    ///
    /// If `other` has another shape.
    pub fn leave(self, other: Tensor<3>) -> Tensor<3> {
        self.plus(other, Prologue::None).x
    }

    /// What `norm` makes of the stream.
    ///
    /// # Panics
    ///
    /// If `norm` does not fit or is no norm.
    pub fn norm(self, norm: Prologue) -> Tensor<3> {
        let (step, params) = norm.apart("residual", &self.x.dims());
        assert!(step.is_norm(), "residual: {step:?} is no norm");
        let (x, params) = (self.x.into_dispatch(), Extras::of(params));
        Tensor::from_dispatch(<Dispatch as ResidualOps>::op_norm(x, params, step, self.joint))
    }

    /// [`linear_with`](super::linear_with) of the stream.
    ///
    /// # Panics
    ///
    /// As [`linear_with`](super::linear_with).
    pub fn linear(
        self,
        prologue: Prologue,
        w: Tensor<2>,
        bias: Option<Tensor<1>>,
        options: LinearOptions,
    ) -> Tensor<3> {
        linear_of(self.x, Some(self.joint), prologue, w, bias, options)
    }
}
