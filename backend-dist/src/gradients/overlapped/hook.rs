//! The operation that sees the gradient of a parameter as soon as the backward pass has it.

use std::fmt;
use std::sync::Arc;

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::{
    Autodiff, Backend, Dispatch, DispatchKindConversion, DispatchTensor, Flex, TensorMetadata, backend_extension,
};
use burn::backend::{autodiff::grads::Gradients, tensor::FloatTensor};
use burn::module::{Module, Reparameterization};
use burn::tensor::Tensor;

use super::reducing::{Field, Reducing};
use crate::local::Placements;
use crate::step_order;

/// To whom the gradient of a parameter goes.
#[derive(Clone)]
pub(super) struct Hook {
    pub reducing: Arc<Reducing>,
    pub field: Field,
    /// Where the parameter is, if it is on a logical device.
    pub placements: Placements,
}

impl fmt::Debug for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.reducing.path(self.field.index))
    }
}

/// Attached to a parameter: its value is the parameter's own, and its gradient is reduced.
#[derive(Module, Debug)]
pub struct Hooked {
    #[module(skip)]
    hook: Hook,
}

impl Hooked {
    pub(super) fn new(hook: Hook) -> Self {
        Self { hook }
    }
}

impl Reparameterization for Hooked {
    const NAME: &'static str = "reduced";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        match self.hook.reducing.is_on() {
            true => Tensor::from_dispatch(Dispatch::hooked(base.into_dispatch(), self.hook.clone())),
            false => base,
        }
    }
}

#[backend_extension(Flex, Cube: cfg(feature = "cuda"), Group: cfg(feature = "decorator"), Autodiff)]
pub(super) trait HookOps: Backend {
    /// `x`, whose gradient goes to the hook instead of to `x`.
    fn hooked(x: FloatTensor<Self>, hook: Hook) -> FloatTensor<Self>;

    /// What this rank has of the gradient where the parameter is, flat.
    fn own_flat(gradient: FloatTensor<Self>, hook: Hook) -> FloatTensor<Self>;
}

macro_rules! hook_ops {
    ($backend:ty) => {
        impl HookOps for $backend {
            fn hooked(x: FloatTensor<Self>, _: Hook) -> FloatTensor<Self> {
                x
            }

            fn own_flat(gradient: FloatTensor<Self>, _: Hook) -> FloatTensor<Self> {
                flat::<Self>(gradient)
            }
        }
    };
}

hook_ops!(Flex);
#[cfg(feature = "cuda")]
hook_ops!(burn::backend::Cube);

#[cfg(feature = "decorator")]
impl HookOps for burn_group::GroupBackend {
    fn hooked(x: FloatTensor<Self>, _: Hook) -> FloatTensor<Self> {
        x
    }

    fn own_flat(gradient: FloatTensor<Self>, hook: Hook) -> FloatTensor<Self> {
        let own = match hook.placements.known() {
            Some(known) => crate::mesh_backend::local::local_of(known.moved_to(gradient)),
            // The device has one rank.
            None => gradient,
        };
        flat::<Self>(own)
    }
}

/// As [`shaped`](crate::gradients::flat::shaped).
fn flat<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let shape = x.shape();
    if shape.num_dims() == 1 { x } else { B::float_reshape(x, [shape.num_elements()].into()) }
}

#[derive(Debug)]
struct HandOver;

impl<B: Backend + HookOps> Backward<B, 2> for HandOver
where
    DispatchTensor: DispatchKindConversion<B>,
{
    type State = Hook;

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        step_order::begin_anew();
        let hook = ops.state;
        let flat = B::own_flat(grads.consume::<B>(&ops.node), hook.clone());
        hook.reducing.arrived(hook.field, Tensor::from_primitive::<B>(flat));
    }
}

impl<B: Backend + HookOps, C: CheckpointStrategy> HookOps for Autodiff<B, C>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    fn hooked(x: FloatTensor<Self>, hook: Hook) -> FloatTensor<Self> {
        if !x.is_tracked() {
            return x;
        }
        match HandOver.prepare::<C>([x.node(), step_order::after_earlier_uses()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                hook.reducing.used(hook.field.index);
                prep.finish(hook, x.into_primitive())
            }
            OpsKind::UnTracked(_) => unreachable!("`x` is tracked"),
        }
    }

    fn own_flat(_: FloatTensor<Self>, _: Hook) -> FloatTensor<Self> {
        unreachable!("gradients of gradients are not supported")
    }
}
