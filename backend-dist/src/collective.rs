//! Collectives on tensors, outside autodiff: gradients, parameters, logits.
//!
//! All members of the group must call the same function with equal shapes, in the same order. Inside a model use
//! [`ops::conjugate`](crate::ops::conjugate), whose backward passes are collectives too.

use crate::comm::{Group, ReduceOp, describe};
use crate::exchange::{Exchange, ExchangeOps};
use burn::backend::flex::FlexTensor;
use burn::backend::{Dispatch, Flex};
use burn::tensor::{DType, Device, Int, Tensor};

/// Every member gets the element-wise reduction over all members.
pub fn all_reduce<const D: usize>(x: Tensor<D>, op: ReduceOp, group: &Group) -> Tensor<D> {
    exchange(x, Exchange::AllReduce(op), group)
}

/// [`all_reduce`] of integers.
pub fn all_reduce_int<const D: usize>(x: Tensor<D, Int>, op: ReduceOp, group: &Group) -> Tensor<D, Int> {
    exchange_int(x, Exchange::AllReduce(op), group)
}

/// Every member gets all members' tensors concatenated along `dim`, in group order.
pub fn all_gather<const D: usize>(x: Tensor<D>, dim: usize, group: &Group) -> Tensor<D> {
    exchange(x, Exchange::AllGather(dim), group)
}

/// [`all_gather`] of integers.
pub fn all_gather_int<const D: usize>(x: Tensor<D, Int>, dim: usize, group: &Group) -> Tensor<D, Int> {
    exchange_int(x, Exchange::AllGather(dim), group)
}

/// Member `i` gets part `i`, along `dim`, of the sum over all members. The group's size must divide the dimension.
pub fn reduce_scatter<const D: usize>(x: Tensor<D>, dim: usize, group: &Group) -> Tensor<D> {
    exchange(x, Exchange::ReduceScatter(dim), group)
}

/// Rows `send_splits[j]` of dimension 0 go to member `j`; the result holds `receive_splits[i]` rows of each member `i`.
pub fn all_to_all<const D: usize>(
    x: Tensor<D>,
    send_splits: &[usize],
    receive_splits: &[usize],
    group: &Group,
) -> Tensor<D> {
    exchange(x, Exchange::AllToAll { send: send_splits.to_vec(), receive: receive_splits.to_vec() }, group)
}

/// Every member gets the tensor of member `root`; the others pass one of the same shape.
pub fn broadcast<const D: usize>(x: Tensor<D>, root: usize, group: &Group) -> Tensor<D> {
    exchange(x, Exchange::Broadcast(root), group)
}

/// [`broadcast`] of integers.
pub fn broadcast_int<const D: usize>(x: Tensor<D, Int>, root: usize, group: &Group) -> Tensor<D, Int> {
    exchange_int(x, Exchange::Broadcast(root), group)
}

/// Links neighbours in the ring of the group's members, so that [`send`] and [`recv`] between them stay on the GPUs if
/// every member has its own. Without it, and between others, the host carries the data. All members must call it.
pub fn connect(group: &Group, device: &Device) {
    #[cfg(feature = "cuda")]
    crate::nccl::pairs::connect(group, device);
    #[cfg(not(feature = "cuda"))]
    let _ = (group, device);
}

/// Sends `x` to member `to`, which must call [`recv`] with its shape and type. Does not wait.
pub fn send<const D: usize>(x: Tensor<D>, to: usize, group: &Group) {
    #[cfg(feature = "cuda")]
    if let Some((pair, link)) = crate::nccl::pairs::link(group, group.rank(), to)
        && let Ok(x) = x.clone().without_autodiff().try_into_primitive::<burn::backend::Cube>()
    {
        return crate::nccl::pairs::send(x, &pair, &link);
    }
    let host = match x.clone().try_into_primitive::<Flex>() {
        Ok(primitive) => primitive,
        Err(_) => FlexTensor::from_data(x.into_data()),
    };
    group.send(host, to);
}

/// Receives the oldest tensor that member `from` has sent; waits for it.
pub fn recv<const D: usize>(shape: [usize; D], dtype: DType, device: &Device, from: usize, group: &Group) -> Tensor<D> {
    start_recv(shape, dtype, device, from, group).wait()
}

/// Starts to receive the next tensor that member `from` sends. Between linked GPUs it comes beside what this rank
/// computes; elsewhere nothing happens before [`Incoming::wait`].
pub fn start_recv<const D: usize>(
    shape: [usize; D],
    dtype: DType,
    device: &Device,
    from: usize,
    group: &Group,
) -> Incoming<D> {
    #[cfg(feature = "cuda")]
    if let Some((pair, link)) = crate::nccl::pairs::link(group, from, group.rank())
        && let Some(anchor) = crate::nccl::pairs::anchor(device)
    {
        let arriving = Box::new(crate::nccl::pairs::receive(&anchor, shape.into(), dtype, &pair, &link));
        return Incoming(Way::Gpu { arriving, tracked: device.is_autodiff() });
    }
    Incoming(Way::Host { shape, dtype, device: device.clone(), from, group: group.clone() })
}

/// A tensor that [`start_recv`] receives. Those of one sender must be waited for in the order in which they were
/// started.
#[must_use = "the sender's tensors are received in order, so one that is not waited for is taken for a later one"]
pub struct Incoming<const D: usize>(Way<D>);

enum Way<const D: usize> {
    #[cfg(feature = "cuda")]
    Gpu {
        arriving: Box<crate::nccl::pairs::Arriving>,
        tracked: bool,
    },
    Host {
        shape: [usize; D],
        dtype: DType,
        device: Device,
        from: usize,
        group: Group,
    },
}

impl<const D: usize> Incoming<D> {
    /// The tensor. On linked GPUs the host goes on, and what this thread issues from now on waits for it; elsewhere the
    /// host waits.
    pub fn wait(self) -> Tensor<D> {
        match self.0 {
            #[cfg(feature = "cuda")]
            Way::Gpu { arriving, tracked } => {
                let x = Tensor::from_primitive::<burn::backend::Cube>(arriving.wait());
                if tracked { x.autodiff() } else { x }
            }
            Way::Host { shape, dtype, device, from, group } => {
                let host = group.receive(describe(dtype, &shape), from);
                Tensor::from_data(host.into_data(), (&device, dtype))
            }
        }
    }
}

impl<const D: usize> std::fmt::Debug for Incoming<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str(match self.0 {
            #[cfg(feature = "cuda")]
            Way::Gpu { .. } => "Incoming(started)",
            Way::Host { .. } => "Incoming",
        })
    }
}

fn exchange<const D: usize>(x: Tensor<D>, how: Exchange, group: &Group) -> Tensor<D> {
    Tensor::from_dispatch(Dispatch::exchange(x.into_dispatch(), how, None, group.clone()))
}

fn exchange_int<const D: usize>(x: Tensor<D, Int>, how: Exchange, group: &Group) -> Tensor<D, Int> {
    Tensor::from_dispatch(Dispatch::exchange_int(x.into_dispatch(), how, group.clone()))
}
