//! Collectives on tensors, outside autodiff: gradients, parameters, logits.
//!
//! All members of the group must call the same function with equal shapes, in the same order. Models use
//! `tensor_parallel` of the crate `ops`, whose backward passes are collectives too.
//!
//! ```
//! use ranks::{collective::{all_gather, reduce_scatter}, launch::launch, mesh::{Axis, Mesh}};
//! use burn::tensor::{Device, Tensor};
//!
//! let mesh = Mesh::new("TP2".parse()?)?;
//! let shards = launch(&mesh, &[Device::flex()], |rank| {
//!     let tp = rank.group(Axis::Tp);
//!     let all = all_gather(Tensor::<1>::full([2], rank.rank as f32, &rank.device), 0, &tp);
//!     assert_eq!(all.to_data().iter::<f32>().collect::<Vec<_>>(), [0.0, 0.0, 1.0, 1.0]);
//!     Ok(reduce_scatter(all, 0, &tp).into_data().iter::<f32>().collect::<Vec<_>>())
//! })?;
//! assert_eq!(shards, [[0.0, 0.0], [2.0, 2.0]]);
//! # Ok::<(), ranks::launch::BoxError>(())
//! ```

use crate::collective_ops::{Collective, CollectiveOps};
use crate::comm::{Group, ReduceOp, describe};
use burn::backend::flex::FlexTensor;
use burn::backend::{Dispatch, Flex};
use burn::tensor::{DType, Device, Int, Tensor};

/// Every member gets the element-wise reduction over all members.
pub fn all_reduce<const D: usize>(x: Tensor<D>, op: ReduceOp, group: &Group) -> Tensor<D> {
    collective(x, Collective::AllReduce(op), group)
}

/// [`all_reduce`] of integers.
pub fn all_reduce_int<const D: usize>(x: Tensor<D, Int>, op: ReduceOp, group: &Group) -> Tensor<D, Int> {
    collective_int(x, Collective::AllReduce(op), group)
}

/// Every member gets all members' tensors concatenated along `dim`, in group order.
pub fn all_gather<const D: usize>(x: Tensor<D>, dim: usize, group: &Group) -> Tensor<D> {
    collective(x, Collective::AllGather(dim), group)
}

/// [`all_gather`] of integers.
pub fn all_gather_int<const D: usize>(x: Tensor<D, Int>, dim: usize, group: &Group) -> Tensor<D, Int> {
    collective_int(x, Collective::AllGather(dim), group)
}

/// Member `i` gets shard `i`, along `dim`, of the sum over all members. The group's size must divide the dimension.
pub fn reduce_scatter<const D: usize>(x: Tensor<D>, dim: usize, group: &Group) -> Tensor<D> {
    collective(x, Collective::ReduceScatter(dim), group)
}

/// Rows `send_splits[j]` of dimension 0 go to member `j`; the result holds `receive_splits[i]` rows of each member `i`.
pub fn all_to_all<const D: usize>(
    x: Tensor<D>,
    send_splits: &[usize],
    receive_splits: &[usize],
    group: &Group,
) -> Tensor<D> {
    collective(x, Collective::AllToAll { send: send_splits.to_vec(), receive: receive_splits.to_vec() }, group)
}

/// Every member gets the tensor of member `root`; the others pass one of the same shape.
pub fn broadcast<const D: usize>(x: Tensor<D>, root: usize, group: &Group) -> Tensor<D> {
    collective(x, Collective::Broadcast(root), group)
}

/// Member `root` gets the sum over all members; the others get their own tensor back.
pub fn reduce<const D: usize>(x: Tensor<D>, root: usize, group: &Group) -> Tensor<D> {
    collective(x, Collective::Reduce(root), group)
}

/// [`broadcast`] of integers.
pub fn broadcast_int<const D: usize>(x: Tensor<D, Int>, root: usize, group: &Group) -> Tensor<D, Int> {
    collective_int(x, Collective::Broadcast(root), group)
}

/// See [`one_shot_sums`].
#[must_use = "it ends when it is dropped"]
pub struct OneShotSums {
    #[cfg(feature = "cuda")]
    link: Option<std::sync::Arc<crate::nccl::Communicator>>,
}

/// Until the result is dropped, sums of small tensors over `group` are taken by one kernel in place of NCCL: those of at
/// most 512 KiB divided by the number of members, in bf16, f16, f32 and f64. All members get the same bits, summed in f32
/// (f64 in f64) in the order of the ranks. The GPUs must write to each other's memory, on one host with peer access;
/// otherwise nothing changes, and one line on stderr says why.
///
/// All members call it, and drop the result, between the same collectives. The kernels are on the compute stream, so no
/// overlapped collective should be in flight.
pub fn one_shot_sums(group: &Group, device: &Device) -> OneShotSums {
    #[cfg(feature = "cuda")]
    {
        let gpu = gpu::index(device).filter(|_| group.size() > 1);
        let link = gpu.and_then(|gpu| crate::nccl::connect(group, Some(gpu)));
        let link = link.filter(|link| link.one_shot(group).inspect(|one_shot| one_shot.use_it(true)).is_some());
        OneShotSums { link }
    }
    #[cfg(not(feature = "cuda"))]
    {
        let _ = (group, device);
        OneShotSums {}
    }
}

impl OneShotSums {
    /// Whether the kernel for sums of tensors like `x` also adds them to the residual stream and takes the RMSNorm of
    /// their last dimension, for which the crate `ops` has `Residual::plus_sum`: of up to 64 rows of up to 16,384 elements
    /// in bf16, f16 or f32, on GPUs since Ampere.
    pub fn take_norms<const D: usize>(&self, x: &Tensor<D>) -> bool {
        #[cfg(feature = "cuda")]
        {
            let x = x.clone().without_autodiff().try_into_primitive::<burn::backend::Cube>();
            self.link.as_ref().zip(x.ok()).is_some_and(|(link, x)| crate::nccl::normed_rows(&x, link).is_some())
        }
        #[cfg(not(feature = "cuda"))]
        {
            let _ = x;
            false
        }
    }
}

#[cfg(feature = "cuda")]
impl Drop for OneShotSums {
    fn drop(&mut self) {
        if let Some(one_shot) = self.link.as_ref().and_then(|link| link.existing_one_shot()) {
            one_shot.use_it(false);
        }
    }
}

/// Makes the group's communicator, and finds out whether DMA copy engines reach all members, if `device` is a GPU. All
/// members must call it. Without it the first collectives do, which gather over the group: on a thread that is not the
/// program's, one rank may be there while another is in a collective of its program.
pub fn join(group: &Group, device: &Device) {
    #[cfg(feature = "cuda")]
    if let Some(gpu) = gpu::index(&device.clone().without_autodiff()).filter(|_| group.size() > 1)
        && let Some(link) = crate::nccl::connect(group, Some(gpu))
    {
        link.copies(group);
    }
    #[cfg(not(feature = "cuda"))]
    let _ = (group, device);
}

/// Links neighbours in the ring of the group's members, so that [`send`] and [`recv`] between them stay on the GPUs if
/// every member has its own. Without it, and between others, the host carries the data. All members must call it.
pub fn connect(group: &Group, device: &Device) {
    #[cfg(feature = "cuda")]
    crate::nccl::p2p::connect(group, device);
    #[cfg(not(feature = "cuda"))]
    let _ = (group, device);
}

/// Sends `x` to member `to`, which must call [`recv`] with its shape and type. Does not wait.
pub fn send<const D: usize>(x: Tensor<D>, to: usize, group: &Group) {
    #[cfg(feature = "cuda")]
    if let Some((pair, link)) = crate::nccl::p2p::link(group, group.rank(), to)
        && let Ok(x) = x.clone().without_autodiff().try_into_primitive::<burn::backend::Cube>()
    {
        return crate::nccl::p2p::send(x, &pair, &link);
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

/// Starts to receive the next tensor that member `from` sends. Between linked GPUs the transfer overlaps with what this
/// rank computes; elsewhere nothing happens before [`Incoming::wait`].
pub fn start_recv<const D: usize>(
    shape: [usize; D],
    dtype: DType,
    device: &Device,
    from: usize,
    group: &Group,
) -> Incoming<D> {
    #[cfg(feature = "cuda")]
    if let Some((pair, link)) = crate::nccl::p2p::link(group, from, group.rank())
        && let Some(anchor) = crate::nccl::p2p::anchor(device)
    {
        let arriving = Box::new(crate::nccl::p2p::receive(&anchor, shape.into(), dtype, &pair, &link));
        return Incoming(Transfer::Gpu { arriving, tracked: device.is_autodiff() });
    }
    Incoming(Transfer::Host { shape, dtype, device: device.clone(), from, group: group.clone() })
}

/// A tensor that [`start_recv`] receives. Those of one sender must be waited for in the order in which they were
/// started.
#[must_use = "the sender's tensors are received in order, so one that is not waited for is taken for a later one"]
pub struct Incoming<const D: usize>(Transfer<D>);

enum Transfer<const D: usize> {
    #[cfg(feature = "cuda")]
    Gpu {
        arriving: Box<crate::nccl::p2p::Receiving>,
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
    /// The tensor. On linked GPUs the host continues, and what this thread issues from now on waits for the tensor;
    /// elsewhere the host waits.
    pub fn wait(self) -> Tensor<D> {
        match self.0 {
            #[cfg(feature = "cuda")]
            Transfer::Gpu { arriving, tracked } => {
                let x = Tensor::from_primitive::<burn::backend::Cube>(arriving.wait());
                if tracked { x.autodiff() } else { x }
            }
            Transfer::Host { shape, dtype, device, from, group } => {
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
            Transfer::Gpu { .. } => "Incoming(started)",
            Transfer::Host { .. } => "Incoming",
        })
    }
}

fn collective<const D: usize>(x: Tensor<D>, op: Collective, group: &Group) -> Tensor<D> {
    Tensor::from_dispatch(Dispatch::collective(x.into_dispatch(), op, None, group.clone()))
}

fn collective_int<const D: usize>(x: Tensor<D, Int>, op: Collective, group: &Group) -> Tensor<D, Int> {
    Tensor::from_dispatch(Dispatch::collective_int(x.into_dispatch(), op, group.clone()))
}
