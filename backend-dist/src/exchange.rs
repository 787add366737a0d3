//! The one extension operation behind every collective: an exchange over a group, and the exchange of its backward.

use crate::comm::{Group, ReduceOp};
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
#[cfg(feature = "cuda")]
use burn::backend::ops::{FloatTensorOps, IntTensorOps};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Autodiff, Backend, Flex, backend_extension};

/// What happens to a tensor over a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exchange {
    /// Nothing.
    Identity,
    /// Every member gets the reduction over all members.
    AllReduce(ReduceOp),
    /// Every member gets all members' tensors, concatenated along the dimension in group order.
    AllGather(usize),
    /// Every member gets its part, along the dimension, of the sum over all members.
    ReduceScatter(usize),
    /// Every member keeps its part along the dimension; nothing is sent.
    Slice(usize),
    /// Every member gets the tensor of this member.
    Broadcast(usize),
    /// Rows of dimension 0 change owner.
    AllToAll {
        /// Rows for each member.
        send: Vec<usize>,
        /// Rows from each member.
        receive: Vec<usize>,
    },
}

/// Exchange over a group as an operation of the backend.
#[backend_extension(Flex, Cube: cfg(feature = "cuda"), Autodiff)]
pub trait ExchangeOps: Backend {
    /// Does `forward` to `x`; its gradient undergoes `backward`. Without `backward` the operation has no gradient and
    /// panics on a tensor that needs one.
    fn exchange(x: FloatTensor<Self>, forward: Exchange, backward: Option<Exchange>, group: Group)
    -> FloatTensor<Self>;

    /// Does `forward` to an integer tensor.
    fn exchange_int(x: IntTensor<Self>, forward: Exchange, group: Group) -> IntTensor<Self>;
}

/// The in-process transport.
fn in_process(x: FlexTensor, exchange: Exchange, group: &Group) -> FlexTensor {
    if group.size() == 1 {
        return x;
    }
    match exchange {
        Exchange::Identity => x,
        Exchange::AllReduce(op) => group.all_reduce(x, op),
        Exchange::AllGather(dim) => group.all_gather(x, dim),
        Exchange::ReduceScatter(dim) => group.reduce_scatter(x, dim),
        Exchange::Slice(dim) => {
            let length = x.layout().shape()[dim];
            assert!(
                length.is_multiple_of(group.size()),
                "slice on {group:?}: dimension {dim} has {length} elements, not a multiple of {}",
                group.size()
            );
            let part = length / group.size();
            x.narrow(dim, group.rank() * part, part)
        }
        Exchange::Broadcast(root) => group.broadcast(x, root),
        Exchange::AllToAll { send, receive } => group.all_to_all(x, &send, &receive),
    }
}

impl ExchangeOps for Flex {
    fn exchange(x: FlexTensor, forward: Exchange, _backward: Option<Exchange>, group: Group) -> FlexTensor {
        in_process(x, forward, &group)
    }

    fn exchange_int(x: FlexTensor, forward: Exchange, group: Group) -> FlexTensor {
        in_process(x, forward, &group)
    }
}

/// Over NCCL where every rank has a GPU of its own, otherwise through host memory.
#[cfg(feature = "cuda")]
impl ExchangeOps for burn::backend::Cube {
    fn exchange(
        x: FloatTensor<Self>,
        forward: Exchange,
        _backward: Option<Exchange>,
        group: Group,
    ) -> FloatTensor<Self> {
        if group.size() == 1 {
            return x;
        }
        if let Some(link) = crate::nccl::connect(&group, crate::nccl::gpu_of(&x.device)) {
            return crate::nccl::exchange(x, forward, &group, &link);
        }
        let device = x.device.clone();
        let data = burn::tensor::try_read_sync(Self::float_into_data(x)).expect("a CubeCL device reads synchronously");
        let data = data.expect("the device gives its data back");
        Self::float_from_data(in_process(FlexTensor::from_data(data), forward, &group).into_data(), &device)
    }

    fn exchange_int(x: IntTensor<Self>, forward: Exchange, group: Group) -> IntTensor<Self> {
        if group.size() == 1 {
            return x;
        }
        if let Some(link) = crate::nccl::connect(&group, crate::nccl::gpu_of(&x.device)) {
            return crate::nccl::exchange(x, forward, &group, &link);
        }
        let device = x.device.clone();
        let data = burn::tensor::try_read_sync(Self::int_into_data(x)).expect("a CubeCL device reads synchronously");
        let data = data.expect("the device gives its data back");
        Self::int_from_data(in_process(FlexTensor::from_data(data), forward, &group).into_data(), &device)
    }
}

impl<B: Backend + ExchangeOps, C: CheckpointStrategy> ExchangeOps for Autodiff<B, C> {
    fn exchange(
        x: FloatTensor<Self>,
        forward: Exchange,
        backward: Option<Exchange>,
        group: Group,
    ) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct Conjugate;

        impl<B: Backend + ExchangeOps> Backward<B, 1> for Conjugate {
            type State = (Exchange, Group);

            fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
                let [parent] = ops.parents;
                let grad = grads.consume::<B>(&ops.node);
                let (exchange, group) = ops.state;
                let grad = B::exchange(grad, exchange, None, group);
                if let Some(parent) = parent {
                    grads.register::<B>(parent.id, grad);
                }
            }
        }

        // Compute-bound: a checkpointing strategy must never repeat an exchange, its peers would not.
        match Conjugate.prepare::<C>([x.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let backward = backward.unwrap_or_else(|| {
                    panic!("{forward:?} on {group:?} has no gradient: use `ops::conjugate` inside a model, or detach")
                });
                let out = B::exchange(x.into_primitive(), forward, None, group.clone());
                prep.finish((backward, group), out)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::exchange(x.into_primitive(), forward, None, group)),
        }
    }

    fn exchange_int(x: IntTensor<Self>, forward: Exchange, group: Group) -> IntTensor<Self> {
        B::exchange_int(x, forward, group)
    }
}
