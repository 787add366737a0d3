//! One rank: its coordinates, its device and its groups.

mod panics;
mod threads;

use crate::attached::{Attached, Attachments};
use crate::comm::{Group, World};
use crate::mesh::{Axis, Coords, Mesh, ParallelLayout};
use burn::tensor::Device;
use std::sync::Arc;
use std::time::Duration;
pub(crate) use threads::{launch_in, thread_error};

/// Any error a rank may return.
///
/// ```
/// use ranks::{launch::{BoxError, launch}, mesh::Mesh};
/// use burn::tensor::Device;
///
/// /// What `?` makes of any error, on a rank and around it.
/// fn largest(layout: &str, values: &[i64]) -> Result<i64, BoxError> {
///     let ranks = launch(&Mesh::new(layout.parse()?)?, &[Device::flex()], |rank| {
///         Ok(*values.get(rank.rank).ok_or("more ranks than values")?)
///     })?;
///     Ok(ranks.into_iter().max().ok_or("no rank")?)
/// }
/// assert_eq!(largest("DP2", &[3, 5])?, 5);
/// assert!(largest("DP3", &[3, 5]).unwrap_err().to_string().contains("more ranks than values"));
/// assert!(largest("DP0", &[]).is_err(), "no such layout");
/// # Ok::<(), BoxError>(())
/// ```
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// One rank: its coordinates in the mesh, its device and its groups.
///
/// ```
/// use ranks::{launch::launch, mesh::{Axis, Mesh}};
/// use burn::tensor::Device;
///
/// let mesh = Mesh::new("TP2 PP2".parse()?)?;
/// let peers = launch(&mesh, &[Device::flex()], |rank| {
///     let pipeline = rank.group(Axis::Pp);
///     Ok((rank.coords.pp, pipeline.ranks().to_vec()))
/// })?;
/// assert_eq!(peers[3], (1, vec![1, 3]));
/// # Ok::<(), ranks::launch::BoxError>(())
/// ```
#[derive(Clone)]
pub struct Rank {
    /// Global rank, `0..world`.
    pub rank: usize,
    /// Position on every axis.
    pub coords: Coords,
    /// The mesh all ranks share.
    pub mesh: Arc<Mesh>,
    /// The device this rank owns, without autodiff.
    pub device: Device,
    world: Arc<World>,
    attached: Attachments,
}

impl Rank {
    fn new(rank: usize, mesh: Arc<Mesh>, device: Device, world: Arc<World>) -> Self {
        Self { rank, coords: mesh.coords(rank), mesh, device, world, attached: Attachments::default() }
    }

    /// The only rank of a world of one, on the calling thread.
    pub fn single(device: Device) -> Self {
        let mesh = Arc::new(Mesh::new(ParallelLayout::default()).expect("the layout of one device is legal"));
        Self::new(0, mesh, device, World::new(vec![String::new()]))
    }

    /// Whether DMA copy engines transfer the activations of tensor parallelism and the tokens of expert parallelism
    /// between GPUs of this process with peer access, which is the default. Overlapped GEMMs then keep all SMs. Otherwise
    /// NCCL's kernels transfer them. It holds for all ranks of the run, from before their first collective on a GPU.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "CPU ranks have shared memory"))]
    pub fn use_copy_engines(&self, on: bool) {
        #[cfg(feature = "cuda")]
        self.world.links.use_copy_engines(on);
    }

    /// How long the rank has waited for its peers on the host, since the launch.
    pub fn waited(&self) -> Duration {
        self.world.waited(self.rank)
    }

    /// This rank's handle on its group along `axis`.
    pub fn group(&self, axis: Axis) -> Group {
        Group::new(&self.world, &axis.to_string(), &self.mesh.group_of(axis, self.rank), self.rank)
    }

    /// What another crate keeps with this rank; its clones have the same.
    pub fn attached<T: Attached + Default>(&self) -> Arc<T> {
        self.attached.get()
    }

    /// This rank's handle on the block of `size` neighbours that it belongs to within its group along `axis`.
    ///
    /// # Panics
    /// If `size` does not divide the group's size.
    pub fn subgroup(&self, axis: Axis, size: usize) -> Group {
        let ranks = self.mesh.group_of(axis, self.rank);
        assert!(
            size > 0 && ranks.len().is_multiple_of(size),
            "subgroups of {size} do not divide the {} ranks of axis {axis}",
            ranks.len()
        );
        let block = ranks.chunks(size).find(|block| block.contains(&self.rank)).expect("a rank is in its own group");
        Group::new(&self.world, &format!("{axis}/{size}"), block, self.rank)
    }

    /// This rank's handle on the ranks that have its position in their blocks of `size` neighbours: one of each
    /// [`subgroup`](Self::subgroup) of its group along `axis`.
    ///
    /// # Panics
    /// If `size` does not divide the group's size.
    pub fn across_subgroups(&self, axis: Axis, size: usize) -> Group {
        let (ranks, own) = (self.mesh.group_of(axis, self.rank), self.subgroup(axis, size).rank());
        let ranks: Vec<usize> = ranks.chunks(size).map(|block| block[own]).collect();
        Group::new(&self.world, &format!("{axis} across {size}"), &ranks, self.rank)
    }

    /// Whether one process hosts this rank and `other`.
    pub fn is_in_same_process(&self, other: usize) -> bool {
        self.world.process_of(self.rank) == self.world.process_of(other)
    }

    /// Whether its process has no other rank.
    pub fn is_alone_in_process(&self) -> bool {
        (0..self.mesh.world_size()).all(|other| other == self.rank || !self.is_in_same_process(other))
    }

    /// Whether this is the first rank of its process.
    pub fn leads_process(&self) -> bool {
        self.rank == 0 || self.world.process_of(self.rank) != self.world.process_of(self.rank - 1)
    }

    /// This rank's handle on the pair of the first and the last rank of its group along `axis`, if it is one of them.
    pub fn ends(&self, axis: Axis) -> Option<Group> {
        let ranks = self.mesh.group_of(axis, self.rank);
        let ends = [*ranks.first()?, *ranks.last()?];
        let is_pair = ends[0] != ends[1] && ends.contains(&self.rank);
        is_pair.then(|| Group::new(&self.world, &format!("{axis} ends"), &ends, self.rank))
    }
}

/// The coordinates that tell ranks of this mesh apart, for example `tp 1, dp 0`; empty for a single rank.
pub fn mesh_position(mesh: &Mesh, rank: usize) -> String {
    let (layout, at) = (mesh.layout(), mesh.coords(rank));
    [("pp", layout.pp, at.pp), ("dp", layout.dp, at.dp), ("cp", layout.cp, at.cp), ("tp", layout.tp, at.tp)]
        .iter()
        .filter(|(_, size, _)| *size > 1)
        .map(|(name, _, index)| format!("{name} {index}"))
        .collect::<Vec<_>>()
        .join(", ")
}
