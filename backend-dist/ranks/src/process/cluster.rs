//! The same processes for one launch after the other.

use super::introduction::division;
use super::joined::{ProcessChannel, Processes};
use super::{JoinError, ProcessWorld};
use crate::comm::RunError;
use crate::mesh::{Mesh, ParallelLayout};
use crate::rank::{BoxError, Rank};
use burn::tensor::Device;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt::{self, Display};
use std::ops::Range;
use std::sync::Arc;

/// Where launches run, one after the other and each with a mesh of its own: the devices of this process, and the other
/// processes that torchrun, srun or mpirun have started with it. All of them make the same launches.
///
/// Without a launcher this process runs all ranks:
///
/// ```
/// use ranks::{mesh::{Axis, Mesh}, process::Cluster};
/// use burn::tensor::Device;
///
/// let cluster = Cluster::from_env(&[])?.on(vec![Device::flex()]);
/// for layout in ["DP2", "TP2 DP2"] {
///     let mesh = Mesh::new(layout.parse()?)?;
///     let sizes = cluster.launch_all(&mesh, |rank| Ok(rank.group(Axis::Dp).size()))?;
///     assert_eq!(sizes, vec![2; mesh.world_size()]);
/// }
/// # Ok::<(), ranks::launch::BoxError>(())
/// ```
#[derive(Clone)]
pub struct Cluster {
    devices: Vec<Device>,
    together: Option<Arc<Together>>,
}

/// What the processes have in common for as long as they work together. Its connections are open between the launches
/// too: a process that fails there is noticed by all.
struct Together {
    world: ProcessWorld,
    processes: Processes,
    /// What is gathered before and after launches.
    channel: ProcessChannel,
}

impl Cluster {
    /// Joins the processes that the variables of the environment speak of; this process alone if they speak of none. No
    /// devices yet.
    ///
    /// # Errors
    /// As [`join`](Self::join), or if the variables make no sense.
    pub fn from_env(agreement: &[(&str, String)]) -> Result<Self, JoinError> {
        match ProcessWorld::from_env()? {
            Some(world) => Self::join(&world, agreement),
            None => Ok(Self::from([])),
        }
    }

    /// Waits until all processes are there. They must run the same executable and have the same `agreement`: names with
    /// values, for example the arguments of a command.
    ///
    /// # Errors
    /// If somebody does not come in time, or the processes differ; the same words in all that came.
    pub fn join(world: &ProcessWorld, agreement: &[(&str, String)]) -> Result<Self, JoinError> {
        let processes = Processes::without_ranks(world, agreement)?;
        let channel = processes.channel("launches");
        Ok(Self {
            devices: Vec::new(),
            together: Some(Arc::new(Together { world: world.clone(), processes, channel })),
        })
    }

    /// The same processes, with these devices for the ranks of this one: of every launch the `i`-th rank here owns
    /// `devices[i % devices.len()]`.
    pub fn on(&self, devices: Vec<Device>) -> Self {
        Self { devices, together: self.together.clone() }
    }

    /// Processes.
    pub fn count(&self) -> usize {
        self.together.as_ref().map_or(1, |together| together.world.processes)
    }

    /// This process, `0..count`.
    pub fn process(&self) -> usize {
        self.together.as_ref().map_or(0, |together| together.world.process)
    }

    /// Whether this is the process of rank 0, which speaks to the user and writes files.
    pub fn is_first(&self) -> bool {
        self.process() == 0
    }

    /// The devices of the host that belong to the ranks of this process, one each, by number.
    ///
    /// # Errors
    /// If the ranks cannot be assigned to the processes evenly.
    pub fn local_devices(&self, layout: &ParallelLayout) -> Result<Range<usize>, JoinError> {
        let ranks = layout.world_size();
        let Some(together) = &self.together else { return Ok(0..ranks) };
        let world = &together.world;
        let share = world.share(ranks).ok_or_else(|| division(world, ranks, layout))?;
        Ok(world.local * share..(world.local + 1) * share)
    }

    /// The processes for one launch of `mesh`; all must call it together.
    ///
    /// # Errors
    /// The first failure of any process.
    pub fn processes(&self, mesh: &Mesh) -> Result<Processes, RunError> {
        let Some(Together { world, processes, channel }) = self.together.as_deref() else {
            return Ok(Processes::alone(mesh));
        };
        // Who waits here for a process that has failed hears of it.
        channel.all_gather(&())?;
        let joined = processes.attempt(|| Processes::join(world, mesh, &[]));
        joined.map_err(|_| processes.failure().expect("an attempt has failed"))
    }

    /// Runs `f` once per rank of `mesh` and returns the results of the ranks of this process; see
    /// [`Processes::launch`].
    ///
    /// # Errors
    /// The first failure of any rank of any process, the same in all of them.
    pub fn launch<T: Send>(
        &self,
        mesh: &Mesh,
        f: impl Fn(Rank) -> Result<T, BoxError> + Sync,
    ) -> Result<Vec<T>, RunError> {
        match &self.together {
            None => Processes::alone(mesh).launch(&self.devices, f),
            Some(_) => self.processes(mesh)?.launch(&self.devices, f),
        }
    }

    /// [`launch`](Self::launch), with the results of all ranks in all processes, in the order of the ranks.
    ///
    /// # Errors
    /// The first failure of any rank or process.
    pub fn launch_all<T: Send + Serialize + DeserializeOwned>(
        &self,
        mesh: &Mesh,
        f: impl Fn(Rank) -> Result<T, BoxError> + Sync,
    ) -> Result<Vec<T>, RunError> {
        Ok(self.all_gather(self.launch(mesh, f)?)?.into_iter().flatten().collect())
    }

    /// Every process's value, in the order of the processes; all must call it together.
    ///
    /// # Errors
    /// The first failure of any process.
    pub fn all_gather<T: Serialize + DeserializeOwned>(&self, value: T) -> Result<Vec<T>, RunError> {
        match &self.together {
            None => Ok(vec![value]),
            Some(together) => together.channel.all_gather(&value),
        }
    }

    /// What the first process computes, in all processes.
    ///
    /// # Errors
    /// In the first process its own; in the others, as `E` from a [`RunError`], the same.
    pub fn from_first<T, E>(&self, work: impl FnOnce() -> Result<T, E>) -> Result<T, E>
    where
        T: Serialize + DeserializeOwned,
        E: From<RunError>,
    {
        let own: Vec<T> = if self.is_first() { vec![work()?] } else { Vec::new() };
        let mut all = self.all_gather(own)?;
        Ok(all.swap_remove(0).pop().expect("the first process brings its value"))
    }

    /// Does what the first process must do before the others, so that its files are there for them.
    ///
    /// # Errors
    /// Its own; or, as `E` from a [`RunError`], that of another process.
    pub fn first_then_others<T, E: From<RunError>>(&self, work: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        if !self.is_first() {
            self.all_gather(())?;
        }
        let done = work()?;
        if self.is_first() {
            self.all_gather(())?;
        }
        Ok(done)
    }

    /// Whether all processes are still there, as far as this one knows.
    ///
    /// # Errors
    /// The first failure of any process, outside of launches.
    pub fn check(&self) -> Result<(), RunError> {
        self.together.as_ref().and_then(|together| together.processes.failure()).map_or(Ok(()), Err)
    }

    /// Does the work of the cluster, launches and what is between them: if it fails in one process, it fails in all, and
    /// none returns before all have done theirs.
    ///
    /// # Errors
    /// Its own; or, as `E` from a [`RunError`], that of another process.
    pub fn run<T, E: Display + From<RunError>>(&self, work: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let Some(Together { processes, .. }) = self.together.as_deref() else { return work() };
        let done = processes.attempt(work)?;
        processes.finish()?;
        Ok(done)
    }
}

/// This process alone, with these devices.
impl From<Vec<Device>> for Cluster {
    fn from(devices: Vec<Device>) -> Self {
        Self { devices, together: None }
    }
}

/// This process alone, with these devices.
impl<const N: usize> From<[Device; N]> for Cluster {
    fn from(devices: [Device; N]) -> Self {
        Vec::from(devices).into()
    }
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster").field("devices", &self.devices).field("processes", &self.count()).finish()
    }
}
