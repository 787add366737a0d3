//! The extension operation of all collectives: one collective forward, and the one that its gradient needs backward.

pub use crate::comm::Collective;
use crate::comm::Group;
#[cfg(feature = "group")]
use burn::backend::Group as DeviceGroup;
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
#[cfg(feature = "cuda")]
use burn::backend::ops::{FloatTensorOps, IntTensorOps};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Autodiff, Backend, Flex, backend_extension};
#[cfg(feature = "group")]
use std::sync::OnceLock;

/// Collectives over a group as operations of the backend.
#[backend_extension(Flex, Cube: cfg(feature = "cuda"), Group: cfg(feature = "group"), Autodiff)]
pub trait CollectiveOps: Backend {
    /// Does `forward` to `x`; its gradient undergoes `backward`. Without `backward` the operation has no gradient and
    /// panics on a tensor that needs one.
    fn collective(
        x: FloatTensor<Self>,
        forward: Collective,
        backward: Option<Collective>,
        group: Group,
    ) -> FloatTensor<Self>;

    /// Does `forward` to an integer tensor.
    fn collective_int(x: IntTensor<Self>, forward: Collective, group: Group) -> IntTensor<Self>;
}

/// How collectives are done to tensors of a Burn device group: by the crate whose backend the groups have.
#[cfg(feature = "group")]
pub struct OnGroups {
    /// Floats.
    pub float: fn(FloatTensor<DeviceGroup>, Collective, Group) -> FloatTensor<DeviceGroup>,
    /// Integers.
    pub int: fn(IntTensor<DeviceGroup>, Collective, Group) -> IntTensor<DeviceGroup>,
}

/// Set before there is a tensor of a group. The implementation must be in this crate, since its trait is.
#[cfg(feature = "group")]
pub static ON_GROUPS: OnceLock<OnGroups> = OnceLock::new();

#[cfg(feature = "group")]
fn on_groups() -> &'static OnGroups {
    ON_GROUPS.get().expect("tensors of device groups come from logical devices, which say how")
}

#[cfg(feature = "group")]
impl CollectiveOps for DeviceGroup {
    fn collective(x: FloatTensor<Self>, what: Collective, _: Option<Collective>, group: Group) -> FloatTensor<Self> {
        (on_groups().float)(x, what, group)
    }

    fn collective_int(x: IntTensor<Self>, what: Collective, group: Group) -> IntTensor<Self> {
        (on_groups().int)(x, what, group)
    }
}

/// The in-process transport.
fn in_process(x: FlexTensor, collective: Collective, group: &Group) -> FlexTensor {
    if group.size() == 1 {
        return x;
    }
    match collective {
        Collective::Identity => x,
        Collective::AllReduce(op) => group.all_reduce(x, op),
        Collective::AllGather(dim) => group.all_gather(x, dim),
        Collective::ReduceScatter(dim) => group.reduce_scatter(x, dim),
        Collective::Slice(dim) => {
            let length = x.layout().shape()[dim];
            assert!(
                length.is_multiple_of(group.size()),
                "slice on {group:?}: dimension {dim} has {length} elements, not a multiple of {}",
                group.size()
            );
            let part = length / group.size();
            x.narrow(dim, group.rank() * part, part)
        }
        Collective::Broadcast(root) => group.broadcast(x, root),
        Collective::Reduce(root) => group.reduce(x, root),
        Collective::AllToAll { send, receive } => group.all_to_all(x, &send, &receive),
    }
}

impl CollectiveOps for Flex {
    fn collective(x: FlexTensor, forward: Collective, _backward: Option<Collective>, group: Group) -> FlexTensor {
        in_process(x, forward, &group)
    }

    fn collective_int(x: FlexTensor, forward: Collective, group: Group) -> FlexTensor {
        in_process(x, forward, &group)
    }
}

/// Over NCCL where every rank has a GPU of its own, otherwise through host memory.
#[cfg(feature = "cuda")]
impl CollectiveOps for burn::backend::Cube {
    fn collective(
        x: FloatTensor<Self>,
        forward: Collective,
        _backward: Option<Collective>,
        group: Group,
    ) -> FloatTensor<Self> {
        if group.size() == 1 {
            return x;
        }
        if let Some(link) = crate::nccl::connect(&group, crate::nccl::gpu_of(&x.device)) {
            return crate::nccl::collective(x, forward, &group, &link);
        }
        let device = x.device.clone();
        let data = burn::tensor::try_read_sync(Self::float_into_data(x)).expect("a CubeCL device reads synchronously");
        let data = data.expect("the device gives its data back");
        Self::float_from_data(in_process(FlexTensor::from_data(data), forward, &group).into_data(), &device)
    }

    fn collective_int(x: IntTensor<Self>, forward: Collective, group: Group) -> IntTensor<Self> {
        if group.size() == 1 {
            return x;
        }
        if let Some(link) = crate::nccl::connect(&group, crate::nccl::gpu_of(&x.device)) {
            return crate::nccl::collective(x, forward, &group, &link);
        }
        let device = x.device.clone();
        let data = burn::tensor::try_read_sync(Self::int_into_data(x)).expect("a CubeCL device reads synchronously");
        let data = data.expect("the device gives its data back");
        Self::int_from_data(in_process(FlexTensor::from_data(data), forward, &group).into_data(), &device)
    }
}

impl<B: Backend + CollectiveOps, C: CheckpointStrategy> CollectiveOps for Autodiff<B, C> {
    fn collective(
        x: FloatTensor<Self>,
        forward: Collective,
        backward: Option<Collective>,
        group: Group,
    ) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct Conjugate;

        impl<B: Backend + CollectiveOps> Backward<B, 1> for Conjugate {
            type State = (Collective, Group);

            fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
                let [parent] = ops.parents;
                let grad = grads.consume::<B>(&ops.node);
                let (collective, group) = ops.state;
                let grad = B::collective(grad, collective, None, group);
                if let Some(parent) = parent {
                    grads.register::<B>(parent.id, grad);
                }
            }
        }

        // Compute-bound: a checkpointing strategy must never repeat a collective, its peers would not.
        match Conjugate.prepare::<C>([x.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let backward = backward.unwrap_or_else(|| {
                    panic!(
                        "{forward:?} on {group:?} has no gradient: use `ops::tensor_parallel` inside a model, or detach"
                    )
                });
                let out = B::collective(x.into_primitive(), forward, None, group.clone());
                prep.finish((backward, group), out)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::collective(x.into_primitive(), forward, None, group)),
        }
    }

    fn collective_int(x: IntTensor<Self>, forward: Collective, group: Group) -> IntTensor<Self> {
        B::collective_int(x, forward, group)
    }
}
