//! Groups of ranks and how they communicate on the host.
//!
//! A [`Group`] is one rank's handle on one communicator. Every member must issue the same operations in the same order;
//! whoever does not is named at once (see [`RunError`]). Operations that can fail do not return errors, because they
//! also run inside a backward pass: they stop the rank, and [`launch`](crate::launch::launch) returns the first
//! failure.

#[cfg(any(feature = "cuda", test))]
pub(crate) mod abort;
mod codec;
mod collective;
#[cfg(feature = "cuda")]
mod device;
mod failure;
mod given;
#[cfg(any(feature = "cuda", test))]
pub(crate) mod local_all_gather;
#[cfg(any(feature = "cuda", test))]
pub(crate) mod one_host;
#[cfg(any(feature = "cuda", test))]
mod recorder;
mod reduce;
pub(crate) mod remote;
mod splits;
mod world;

#[cfg(feature = "cuda")]
pub(crate) use device::Member;
pub use failure::Aborted;
pub(crate) use failure::PROCESS;
pub use failure::{FailureCause, LostProcess, OpRecord, RunError};
#[cfg(feature = "cuda")]
pub(crate) use recorder::{DeviceOp, DeviceOpKind};
#[cfg(feature = "cuda")]
pub(crate) use world::DeviceLink;
pub(crate) use world::{GroupId, World};

pub use collective::{Collective, ReduceOp};
pub use splits::Splits;

use crate::memory::{self, without_rank};
use burn::backend::flex::{FlexTensor, Layout};
use burn::tensor::DType;
use codec::Codec;
pub(crate) use codec::{from_bytes, to_bytes};
use reduce::{concat, reduce};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt;
use std::sync::Arc;

/// One rank's handle on one group of ranks. Cheap to clone.
///
/// ```
/// use ranks::{comm::Group, launch::launch, mesh::{Axis, Mesh}};
/// use burn::tensor::Device;
///
/// let mesh = Mesh::new("TP2 DP2".parse()?)?;
/// let seen = launch(&mesh, &[Device::flex()], |rank| {
///     let dp = rank.group(Axis::Dp);
///     assert_eq!((dp.name(), dp.size()), ("dp", 2));
///     let name = dp.broadcast_host((dp.rank() == 0).then(|| format!("rank {}", rank.rank)), 0);
///     Ok((dp.ranks().to_vec(), name))
/// })?;
/// assert_eq!(seen[3], (vec![1, 3], "rank 1".to_string()));
/// assert_eq!(Group::single().size(), 1);
/// # Ok::<(), ranks::launch::BoxError>(())
/// ```
#[derive(Clone)]
pub struct Group {
    name: Arc<str>,
    ranks: Arc<[usize]>,
    member: usize,
    /// `None` for a group of one.
    world: Option<(Arc<World>, GroupId)>,
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?} as member {}", self.name, self.ranks, self.member)
    }
}

impl Group {
    /// The handle of global rank `rank` on the group `ranks` of `world`.
    pub(crate) fn new(world: &Arc<World>, name: &str, ranks: &[usize], rank: usize) -> Self {
        let member = ranks.iter().position(|&r| r == rank).expect("a rank only joins its own groups");
        let world = (ranks.len() > 1).then(|| (world.clone(), world.group(name, ranks)));
        Self { name: name.into(), ranks: ranks.into(), member, world }
    }

    /// A group of one rank: every operation is the identity.
    pub fn single() -> Self {
        Self { name: "single".into(), ranks: [0].into(), member: 0, world: None }
    }

    /// This rank's position in the group, `0..size`.
    pub fn rank(&self) -> usize {
        self.member
    }

    /// Number of ranks in the group.
    pub fn size(&self) -> usize {
        self.ranks.len()
    }

    /// Global ranks of the members, in group order.
    pub fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// Name of the group's axis, for example `tp`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// This rank's handle on the group of some members, of which it is one.
    pub fn members(&self, name: &str, members: &[usize]) -> Self {
        let Some((world, _)) = &self.world else { return self.clone() };
        let ranks: Vec<usize> = members.iter().map(|&member| self.ranks[member]).collect();
        Self::new(world, &format!("{}/{name}", self.name), &ranks, self.ranks[self.member])
    }

    /// Whether one process hosts all members.
    pub fn is_in_one_process(&self) -> bool {
        self.world.as_ref().is_none_or(|(world, _)| {
            let mut processes = self.ranks.iter().map(|&rank| world.process_of(rank));
            let first = processes.next();
            processes.all(|process| Some(process) == first)
        })
    }

    /// Whether this process hosts `member`.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_here(&self, member: usize) -> bool {
        self.world.as_ref().is_none_or(|(world, _)| world.is_here(self.ranks[member]))
    }

    /// Waits until every member has arrived.
    pub fn barrier(&self) {
        self.run_collective("barrier".into(), String::new(), (), codec::host(), |_| ());
    }

    /// Every member's value, in group order. Within a process values are moved; other processes receive
    /// all their bits.
    pub fn all_gather_host<T>(&self, value: T) -> Vec<T>
    where
        T: Clone + Send + Sync + Serialize + DeserializeOwned + 'static,
    {
        let (name, payload) = ("all-gather of host values".into(), std::any::type_name::<T>().to_string());
        Arc::unwrap_or_clone(self.run_collective(name, payload, value, codec::host(), |values| values))
    }

    /// The value of member `root`; the others pass `None`.
    pub fn broadcast_host<T>(&self, value: Option<T>, root: usize) -> T
    where
        T: Clone + Send + Sync + Serialize + DeserializeOwned + 'static,
    {
        // The others may hold something that they need not send.
        let value = value.filter(|_| self.member == root);
        let payload = std::any::type_name::<T>().to_string();
        let pick = |mut values: Vec<Option<T>>| values.swap_remove(root);
        let name = format!("broadcast of a host value from member {root}");
        let value = self.run_collective(name, payload, value, codec::optional(), pick);
        Arc::unwrap_or_clone(value).unwrap_or_else(|| panic!("member {root} of {self:?} broadcasts but has no value"))
    }

    pub(crate) fn all_reduce(&self, x: FlexTensor, op: ReduceOp) -> FlexTensor {
        let name = format!("all-reduce({})", op.name());
        self.own(Arc::unwrap_or_clone(
            self.run_collective(name, self.describe_given(&x), x, codec::TENSOR, |inputs| reduce(inputs, op)),
        ))
    }

    pub(crate) fn all_gather(&self, x: FlexTensor, dim: usize) -> FlexTensor {
        let concat = |inputs: Vec<FlexTensor>| concat(&inputs, dim);
        let name = format!("all-gather(dim {dim})");
        self.own(Arc::unwrap_or_clone(self.run_collective(name, self.describe_given(&x), x, codec::TENSOR, concat)))
    }

    pub(crate) fn reduce_scatter(&self, x: FlexTensor, dim: usize) -> FlexTensor {
        let length = x.layout().shape()[dim];
        let size = self.size();
        assert!(
            length.is_multiple_of(size),
            "reduce-scatter on {self:?}: dimension {dim} has {length} elements, not a multiple of {size}"
        );
        let lent = self.lend(&x);
        let name = format!("reduce-scatter(dim {dim})");
        let inputs = self.run_collective(name, self.describe_given(&x), lent, codec::TENSOR, |inputs| inputs);
        let part = length / size;
        let parts = inputs.iter().map(|x| x.narrow(dim, self.member * part, part)).collect();
        self.own(without_rank(|| reduce(parts, ReduceOp::Sum)))
    }

    /// Rows `send[j]` of dimension 0 go to member `j`; the result holds the rows of member 0, 1, … for this one.
    pub(crate) fn all_to_all(&self, x: FlexTensor, send: &[usize], receive: &[usize]) -> FlexTensor {
        let rows = x.layout().shape()[0];
        assert!(
            send.len() == self.size() && send.iter().sum::<usize>() == rows,
            "all-to-all on {self:?}: send splits {send:?} do not divide {rows} rows among {} members",
            self.size()
        );
        let mut tail = x.layout().shape().to_vec();
        tail[0] = 0;
        self.count_given(&x);
        let payload = format!("{:?} rows of {tail:?}", x.dtype());
        let lent = (self.lend(&x), send.to_vec());
        let inputs = self.run_collective("all-to-all".into(), payload, lent, codec::ROWS, |inputs| inputs);
        let parts: Vec<FlexTensor> = inputs
            .iter()
            .enumerate()
            .map(|(from, (x, splits))| {
                let sent = splits.get(self.member).copied().unwrap_or(0);
                assert!(
                    receive.get(from) == Some(&sent),
                    "all-to-all on {self:?}: member {from} sends {sent} rows, receive splits are {receive:?}"
                );
                x.narrow(0, splits[..self.member].iter().sum(), sent)
            })
            .collect();
        self.own(without_rank(|| concat(&parts, 0)))
    }

    pub(crate) fn broadcast(&self, x: FlexTensor, root: usize) -> FlexTensor {
        let payload = self.describe_given(&x);
        // What the others hold need not be sent.
        let x = Some(x).filter(|_| self.member == root);
        let pick = |mut inputs: Vec<Option<FlexTensor>>| inputs.swap_remove(root);
        let name = format!("broadcast from member {root}");
        let x = Arc::unwrap_or_clone(self.run_collective(name, payload, x, codec::OPTIONAL_TENSOR, pick));
        self.own(x.unwrap_or_else(|| panic!("member {root} of {self:?} broadcasts but has no tensor")))
    }

    /// The sum over all members, on member `root`; the others get `x` back.
    pub(crate) fn reduce(&self, x: FlexTensor, root: usize) -> FlexTensor {
        let name = format!("reduce to member {root}");
        let lent = self.lend(&x);
        let inputs = self.run_collective(name, self.describe_given(&x), lent, codec::TENSOR, |inputs| inputs);
        if self.member != root {
            return x;
        }
        self.own(without_rank(|| reduce(Arc::unwrap_or_clone(inputs), ReduceOp::Sum)))
    }

    /// Sends a value to member `to`, which must call [`receive_host`](Self::receive_host) with its type. Does not wait.
    ///
    /// # Panics
    /// If the group has one member.
    pub fn send_host<T>(&self, value: T, to: usize)
    where
        T: Clone + Send + Sync + Serialize + DeserializeOwned + 'static,
    {
        let (world, id) = self.world.as_ref().unwrap_or_else(|| panic!("send to member {to} of {self:?}"));
        world.send_message(*id, (self.member, to), std::any::type_name::<T>().into(), value, codec::host());
    }

    /// The oldest value or tensor that member `from` has sent, which must be of this type; waits for it.
    ///
    /// # Panics
    /// If the group has one member.
    pub fn receive_host<T>(&self, from: usize) -> T
    where
        T: Clone + Send + Sync + Serialize + DeserializeOwned + 'static,
    {
        let (world, id) = self.world.as_ref().unwrap_or_else(|| panic!("receive from member {from} of {self:?}"));
        world.receive_message(*id, (from, self.member), std::any::type_name::<T>().into(), codec::host())
    }

    /// Sends a tensor to another member of this CPU group.
    ///
    /// # Panics
    /// If the group has one member.
    pub fn send(&self, x: FlexTensor, to: usize) {
        let (world, id) = self.world.as_ref().unwrap_or_else(|| panic!("send to member {to} of {self:?}"));
        world.send_message(*id, (self.member, to), describe_tensor(&x), x, codec::TENSOR);
    }

    /// The tensor that member `from` has sent here, as `payload` [describes](describe) it.
    ///
    /// # Panics
    /// If the group has one member.
    pub fn receive(&self, payload: String, from: usize) -> FlexTensor {
        let (world, id) = self.world.as_ref().unwrap_or_else(|| panic!("receive from member {from} of {self:?}"));
        self.own(world.receive_message(*id, (from, self.member), payload, codec::TENSOR))
    }

    fn run_collective<I, O>(
        &self,
        name: String,
        payload: String,
        input: I,
        codec: Codec<I>,
        combine: impl FnOnce(Vec<I>) -> O,
    ) -> Arc<O>
    where
        I: Send + Sync + 'static,
        O: Send + Sync + 'static,
    {
        match &self.world {
            None => Arc::new(combine(vec![input])),
            Some((world, id)) => {
                let combine = |inputs| without_rank(|| combine(inputs));
                world.run_collective(*id, self.member, (name, payload), input, codec, combine)
            }
        }
    }

    /// The output of a collective: while memory is counted, a copy for this rank instead of a shared one.
    fn own(&self, x: FlexTensor) -> FlexTensor {
        if self.world.is_some() && memory::is_counting() { copy(&x) } else { x }
    }

    /// The input to a collective whose members read each other's tensors: while memory is counted, a copy that counts
    /// for no rank, so that what the rank holds does not depend on when its peers are done reading.
    fn lend(&self, x: &FlexTensor) -> FlexTensor {
        if self.world.is_some() && memory::is_counting() { without_rank(|| copy(x)) } else { x.clone() }
    }
}

fn copy(x: &FlexTensor) -> FlexTensor {
    let (x, width) = (x.to_contiguous(), x.dtype().size());
    let start = x.layout().start_offset() * width;
    let bytes = &x.bytes()[start..start + x.layout().num_elements() * width];
    FlexTensor::new(codec::aligned(bytes, x.dtype()), Layout::contiguous(x.layout().shape().clone()), x.dtype())
}

/// Element type and shape, as both ends of a collective must agree on them.
pub fn describe(dtype: DType, shape: &[usize]) -> String {
    format!("{dtype:?} {shape:?}")
}

fn describe_tensor(x: &FlexTensor) -> String {
    describe(x.dtype(), &x.layout().shape().to_vec())
}
