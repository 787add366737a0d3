//! The operation that gathers a parameter. Its output is not saved for backward but gathered again, and its gradient is
//! reduced right after the step that completes it, if the forward pass takes the value where it uses it.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::{
    base::Checkpointer,
    retro_forward::RetroForward,
    state::BackwardStates,
    strategy::{BalancedCheckpointing, CheckpointStrategy},
};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, DispatchTensor, Flex, TensorMetadata, backend_extension};
use burn::tensor::{GradientCheckpointingStrategy, Slice, Tensor};

use super::gathers::Gathers;
use crate::local::Placements;
use crate::step_order;

/// How one parameter is sharded.
#[derive(Clone)]
pub(super) struct Sharding {
    pub gathers: Arc<Gathers>,
    /// `None` for a parameter that stays whole on every rank.
    pub index: Option<usize>,
    /// The parameter's field in the module.
    pub path: Arc<str>,
    /// Where the parameter is, if it is on a logical device.
    pub placements: Placements,
    /// That its module was sharded with, if it has autodiff.
    pub checkpointing: Option<GradientCheckpointingStrategy>,
}

impl Sharding {
    /// Whether this rank holds the value.
    pub fn is_owner(&self) -> bool {
        self.index.is_none_or(|index| self.gathers.is_owner(index))
    }
}

impl fmt::Debug for Sharding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.index.map_or("whole", |_| &self.path))
    }
}

/// The whole value of a parameter of which this rank holds `base`.
pub(super) fn unshard(base: DispatchTensor, sharding: Sharding) -> DispatchTensor {
    Dispatch::unshard(base, sharding, false)
}

#[backend_extension(Flex, Cube: cfg(feature = "cuda"), Group: cfg(feature = "decorator"), Autodiff)]
pub(super) trait UnshardOps: Backend {
    /// The whole value in the shape of `base`, which is the value or a stand-in of its shape.
    fn unshard(base: FloatTensor<Self>, sharding: Sharding, backward: bool) -> FloatTensor<Self>;

    /// The mean of all ranks' gradients on the owner, unless it comes at the end of the pass.
    fn reduce_gradient(gradient: FloatTensor<Self>, sharding: Sharding) -> Option<FloatTensor<Self>>;
}

/// What a rank passes to a gather of `base`, flat: all of it if it is the owner, else the first element.
pub(super) fn held<B: Backend>(base: FloatTensor<B>, is_owner: bool) -> FloatTensor<B> {
    if is_owner {
        let elements = base.shape().num_elements();
        return B::float_reshape(base, [elements].into());
    }
    let first = vec![Slice::from(0..1); base.shape().num_dims()];
    B::float_reshape(B::float_slice(base, &first), [1].into())
}

macro_rules! unshard_ops {
    ($backend:ty) => {
        impl UnshardOps for $backend {
            fn unshard(base: FloatTensor<Self>, sharding: Sharding, backward: bool) -> FloatTensor<Self> {
                let Some(index) = sharding.index else { return base };
                let shape = base.shape();
                let held = || Tensor::from_primitive::<$backend>(held::<$backend>(base, sharding.is_owner()));
                let whole = sharding.gathers.whole(index, held, backward);
                let whole = whole.try_into_primitive::<$backend>().expect("a value stays on its device");
                Self::float_reshape(whole, shape)
            }

            fn reduce_gradient(gradient: FloatTensor<Self>, sharding: Sharding) -> Option<FloatTensor<Self>> {
                let shape = gradient.shape();
                let flat = Self::float_reshape(gradient, [shape.num_elements()].into());
                let mean = sharding.gathers.reduce(
                    sharding.index,
                    &sharding.path,
                    Tensor::from_primitive::<$backend>(flat),
                )?;
                let mean = mean.try_into_primitive::<$backend>().expect("a gradient stays on its device");
                Some(Self::float_reshape(mean, shape))
            }
        }
    };
}

unshard_ops!(Flex);
#[cfg(feature = "cuda")]
unshard_ops!(burn::backend::Cube);

/// Gathers the value again when the backward pass needs it.
#[derive(Debug)]
struct GatherAgain<B> {
    base: NodeId,
    sharding: Sharding,
    backend: PhantomData<B>,
}

impl<B: Backend + UnshardOps> RetroForward for GatherAgain<B> {
    fn forward(&self, states: &mut BackwardStates, out: NodeId) {
        let base = states.get_state::<B::FloatTensorPrimitive>(&self.base);
        states.save(out, B::unshard(base, self.sharding.clone(), true));
    }
}

#[derive(Debug)]
struct Unshard;

impl<B: Backend + UnshardOps> Backward<B, 2> for Unshard {
    type State = Sharding;

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        step_order::begin_anew();
        let [parent, _] = ops.parents;
        let gradient = grads.consume::<B>(&ops.node);
        let sharding = ops.state;
        let is_owner = sharding.is_owner();
        let mean = B::reduce_gradient(gradient, sharding);
        if let (Some(parent), Some(mean), true) = (parent, mean, is_owner) {
            grads.register::<B>(parent.id, mean);
        }
    }
}

impl<B: Backend + UnshardOps, C: CheckpointStrategy> UnshardOps for Autodiff<B, C> {
    fn unshard(base: FloatTensor<Self>, sharding: Sharding, _backward: bool) -> FloatTensor<Self> {
        let node = base.node();
        if let (Some(index), true) = (sharding.index, base.is_tracked()) {
            sharding.gathers.used(index, &sharding.path);
        }
        // A parameter without a gradient has no step.
        let order = if base.is_tracked() { step_order::after_earlier_uses() } else { base.node() };
        let again = GatherAgain::<B> { base: node.id(), sharding: sharding.clone(), backend: PhantomData };
        // Whatever the device's strategy is, this node is computed again.
        let prep = Unshard
            .prepare::<BalancedCheckpointing>([node, order])
            .memory_bound()
            .retro_forward(again)
            .parents([&base]);
        match prep.stateful() {
            OpsKind::Tracked(prep) => {
                let whole = B::unshard(base.into_primitive(), sharding.clone(), false);
                prep.finish(sharding, whole)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::unshard(base.into_primitive(), sharding, false)),
        }
    }

    fn reduce_gradient(_: FloatTensor<Self>, _: Sharding) -> Option<FloatTensor<Self>> {
        unreachable!("gradients of gradients are not supported")
    }
}
