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
mod tensors;
#[cfg(any(feature = "cuda", test))]
pub(crate) mod watched;
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
pub use tensors::describe;

use crate::memory::without_rank;
use codec::Codec;
pub(crate) use codec::{from_bytes, to_bytes};
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
}
