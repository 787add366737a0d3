//! The residual stream of a block: norms read it, and the block's outputs are added to it.
//!
//! The add before a norm and the norm are one pass over memory. So are, backward, the norm's gradient and the sum with
//! the skip gradient. A node of Burn's graph has one output and registers its gradients itself, so neighbouring
//! operations share a [`Joint`] outside the graph for the normalised value and the skip gradient.

mod joint;
pub(super) mod kernels;
mod node;

use burn::tensor::{DType, Tensor};

pub(super) use joint::Joint;
pub(super) use kernels::ResidualKernels;
pub(super) use node::Apply;

use super::{
    operation::{Tensors, apply, apply_to_all, apply_with},
    pass::PassContext,
    prologue::Prologue,
    step::Step,
    tensor_parallel::{
        Partial,
        fused::{LinearOptions, linear_of},
    },
};
use joint::ResidualAdd;
use node::{Enter, Plus};
use ranks::comm::Group;

/// The residual stream `[s, b, hidden]` between two additions. Norms read it, and adding to it gives the next one.
///
/// All values and gradients are those of the separate operations, bit for bit if the backend has no fused kernels for
/// them. Any tensor becomes a residual stream by `into`.
///
/// ```
/// use ops::{PassContext, Prologue, Residual};
/// use burn::tensor::{Device, Tensor};
///
/// let ones = |shape| Tensor::<3>::ones(shape, &Device::flex());
/// let norm = || Prologue::RmsNorm { weight: Tensor::ones([4], &Device::flex()), rms: 0.0.into() };
/// let stream = Residual::enter(ones([2, 1, 4]), &PassContext::default());
/// let attention = stream.clone().norm(norm()) * 2.0;
/// let stream = stream.plus(attention, norm());
/// let y = stream.clone().leave(stream.norm(norm()));
/// assert_eq!(y.into_data().iter::<f32>().collect::<Vec<_>>(), [4.0; 8]);
/// ```
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
    /// The stream at the entry of a block in a pass. The gradients of the block's operations are summed here and not at `x`,
    /// because a gradient cannot be taken back out of a leaf.
    pub fn enter(x: Tensor<3>, pass: &PassContext) -> Self {
        Self { x: apply(Enter {}, [x.into_dispatch()]), joint: Joint::new(&pass.hand_overs) }
    }

    /// The stream's value, for everything but norms and additions.
    pub fn value(&self) -> Tensor<3> {
        self.x.clone()
    }

    /// Whether operations on the stream are recorded.
    pub fn is_autodiff(&self) -> bool {
        self.x.device().is_autodiff()
    }

    /// The type of the stream's elements.
    pub fn dtype(&self) -> DType {
        self.x.dtype()
    }

    /// The stream plus `other`; `norm` is the next reader of the sum, or [`Prologue::None`] if that is no norm.
    ///
    /// # Panics
    ///
    /// If `other` has another shape, or `norm` does not fit or is no norm.
    pub fn plus(self, other: Tensor<3>, norm: Prologue) -> Self {
        self.plus_of(other, None, norm, None)
    }

    /// The stream plus the sum of what the members of `group` have, as [`plus`](Self::plus). Where
    /// [`one_shot_sums`](ranks::collective::one_shot_sums) is on, the sum, the addition and an RMSNorm are one kernel, and
    /// have the bits that they have apart: those of the stream, and in bf16 and f16 those of the norm. `next` is the weight
    /// that is read then: the GPU has time to prefetch it.
    ///
    /// # Panics
    ///
    /// As [`plus`](Self::plus).
    pub fn plus_sum(self, partial: Partial<3>, group: &Group, norm: Prologue, next: Option<Tensor<2>>) -> Self {
        self.plus_of(partial.into_inner(), Some(group.clone()), norm, next)
    }

    fn plus_of(self, other: Tensor<3>, group: Option<Group>, norm: Prologue, next: Option<Tensor<2>>) -> Self {
        let shape = self.x.dims();
        assert_eq!(shape, other.dims(), "residual: the stream is {shape:?}, what is added {:?}", other.dims());
        let (step, params) = norm.split("residual", &shape);
        assert!(step.is_norm() || matches!(step, Step::None), "residual: {step:?} is no norm");
        let joint = self.joint.next(step);
        let add = ResidualAdd { group, input: self.joint, step, output: joint.clone() };
        let next = next.filter(|_| step.is_norm()).map(Tensor::into_dispatch);
        let constants = Tensors::floats(params.into_iter().chain(next));
        let x = apply_with(Plus { add }, [self.x, other].map(Tensor::into_dispatch), constants);
        Self { x, joint }
    }

    /// The stream plus `other`, at the exit of the block.
    ///
    /// # Panics
    ///
    /// If `other` has another shape.
    pub fn leave(self, other: Tensor<3>) -> Tensor<3> {
        self.plus(other, Prologue::None).x
    }

    /// `norm` of the stream.
    ///
    /// # Panics
    ///
    /// If `norm` does not fit or is no norm.
    pub fn norm(self, norm: Prologue) -> Tensor<3> {
        let (step, params) = norm.split("residual", &self.x.dims());
        assert!(step.is_norm(), "residual: {step:?} is no norm");
        let inputs = [self.x.into_dispatch()].into_iter().chain(params);
        apply_to_all(Apply { step, joint: self.joint }, inputs, Tensors::none())
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
