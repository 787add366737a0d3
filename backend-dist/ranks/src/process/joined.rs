//! The processes of a run after they have found each other.

use super::introduction::{division, introduction};
use super::{JoinError, ProcessWorld};
use crate::comm::remote::{CHILDREN, Introduction, Neighbours, Peer, Remote, parent, rendezvous};
use crate::comm::{FailureCause, PROCESS, RunError, World, from_bytes, to_bytes};
use crate::mesh::{Mesh, ParallelLayout};
use crate::rank::{BoxError, Rank, launch_in, mesh_position, thread_error};
use burn::tensor::Device;
use parking_lot::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt::Display;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// All processes of a world, as one of them sees it; also of a world of one. Made for one [`launch`](Self::launch);
/// dropping it ends the connections, and with them the run of any process that has not finished.
///
/// Without a launcher this runs all ranks; under `torchrun --nproc-per-node 2` each process runs two:
///
/// ```
/// use ranks::{mesh::{Axis, Mesh}, process::Processes};
/// use burn::tensor::Device;
///
/// let mesh = Mesh::new("TP2 DP2".parse()?)?;
/// let processes = Processes::from_env(&mesh, &[])?;
/// let ranks = processes.launch(&[Device::flex()], |rank| Ok(rank.group(Axis::World).all_gather_host(rank.rank)))?;
/// assert_eq!(ranks.len(), processes.ranks().len());
/// assert!(ranks.iter().all(|ranks| *ranks == [0, 1, 2, 3]));
/// # Ok::<(), ranks::launch::BoxError>(())
/// ```
#[derive(Clone)]
pub struct Processes(Arc<Joined>);

struct Joined {
    mesh: Mesh,
    process: usize,
    processes: usize,
    /// Ranks of this process.
    ranks: Range<usize>,
    /// This process among those of its host.
    local: usize,
    world: Arc<World>,
}

impl Processes {
    /// This process hosts all ranks of `mesh`.
    pub fn alone(mesh: &Mesh) -> Self {
        let ranks = 0..mesh.world_size();
        let world = World::new(ranks.clone().map(|rank| mesh_position(mesh, rank)).collect());
        Self(Arc::new(Joined { mesh: mesh.clone(), process: 0, processes: 1, ranks, local: 0, world }))
    }

    /// Joins the processes that the variables of the environment speak of; alone if they speak of none. See
    /// [`ProcessWorld::from_variables`] and [`join`](Self::join).
    pub fn from_env(mesh: &Mesh, agreement: &[(&str, String)]) -> Result<Self, JoinError> {
        match ProcessWorld::from_env()? {
            Some(world) => Self::join(&world, mesh, agreement),
            None => Ok(Self::alone(mesh)),
        }
    }

    /// Waits until all processes are there. They must run the same executable, have the same layout, and the same
    /// `agreement`: names with values, for example the text of a configuration.
    ///
    /// # Errors
    /// If somebody does not come in time, or the processes differ; the same words in all that came.
    pub fn join(world: &ProcessWorld, mesh: &Mesh, agreement: &[(&str, String)]) -> Result<Self, JoinError> {
        let labels = (0..mesh.world_size()).map(|rank| mesh_position(mesh, rank)).collect();
        Self::connect(world, mesh, labels, agreement)
    }

    /// Joins processes that are to make several launches. What fails is a process, not one of its ranks.
    pub(super) fn without_ranks(world: &ProcessWorld, agreement: &[(&str, String)]) -> Result<Self, JoinError> {
        let layout = ParallelLayout { dp: world.processes, ..ParallelLayout::default() };
        let mesh = Mesh::new(layout).expect("data parallelism of any size is legal");
        Self::connect(
            world,
            &mesh,
            (0..world.processes).map(|process| format!("{PROCESS}{process}")).collect(),
            agreement,
        )
    }

    fn connect(
        world: &ProcessWorld,
        mesh: &Mesh,
        labels: Vec<String>,
        agreement: &[(&str, String)],
    ) -> Result<Self, JoinError> {
        let (ranks, processes) = (mesh.world_size(), world.processes);
        let neighbours = Neighbours::of(world);
        let me = introduction(world, &mesh.layout().to_string(), agreement);
        let me = Introduction { port: neighbours.port(), ..me };
        let share = world.share(ranks).ok_or_else(|| division(world, ranks, mesh.layout()))?;
        let (streams, hosts, addresses) = rendezvous(world, &me)?;
        let peer = |stream: Option<_>| stream.map(|stream| Peer::new(stream, world.silence)).transpose();
        let peers = streams.into_iter().map(peer).collect::<Result<_, _>>();
        let peers = peers.map_err(|error| JoinError::Refused(format!("a connection ended at once: {error}")))?;
        let process = world.process;
        let shared = World::over(labels, Some(Remote::new(world, share, hosts, peers)));
        let above = (process > CHILDREN).then(|| addresses[parent(process)]).flatten();
        let started = shared.listen(neighbours, above);
        started.map_err(|error| JoinError::Thread { processes, cause: thread_error(&error) })?;
        let ranks = process * share..(process + 1) * share;
        let (mesh, local) = (mesh.clone(), world.local);
        Ok(Self(Arc::new(Joined { mesh, process, processes, ranks, local, world: shared })))
    }

    #[cfg(test)]
    pub(super) fn world(&self) -> &World {
        &self.0.world
    }

    /// The first failure that this process knows of.
    pub(super) fn failure(&self) -> Option<RunError> {
        self.0.world.failure()
    }

    /// Waits until all processes are done.
    ///
    /// # Errors
    /// The first failure of any of them.
    pub(super) fn finish(&self) -> Result<(), RunError> {
        self.0.world.end().map_or(Ok(()), Err)
    }

    /// This process, `0..count`.
    pub fn process(&self) -> usize {
        self.0.process
    }

    /// Processes of the world.
    pub fn count(&self) -> usize {
        self.0.processes
    }

    /// Whether this is the process of rank 0, which speaks to the user.
    pub fn is_first(&self) -> bool {
        self.0.process == 0
    }

    /// How long a rank of this process waits for its peers before the run counts as dead: ten minutes, unless this is called
    /// before the launch. Whoever computes for longer between two collectives is taken for one that hangs.
    pub fn set_timeout(&self, timeout: Duration) {
        self.0.world.set_patience(timeout);
    }

    /// The mesh of all ranks.
    pub fn mesh(&self) -> &Mesh {
        &self.0.mesh
    }

    /// Global ranks of this process.
    pub fn ranks(&self) -> Range<usize> {
        self.0.ranks.clone()
    }

    /// The devices of the host that belong to the ranks of this process, one each, by number.
    pub fn local_devices(&self) -> Range<usize> {
        let share = self.0.ranks.len();
        self.0.local * share..(self.0.local + 1) * share
    }

    /// Runs `f` once per rank of this process, each on its own thread, and returns their results in rank order, as
    /// [`launch`](crate::launch::launch) does in a world of one process. The `i`-th rank of this process owns
    /// `devices[i % devices.len()]`. To be called once, by all processes.
    ///
    /// # Errors
    /// The first failure of any rank of any process, the same in all of them.
    pub fn launch<T: Send>(
        &self,
        devices: &[Device],
        f: impl Fn(Rank) -> Result<T, BoxError> + Sync,
    ) -> Result<Vec<T>, RunError> {
        launch_in(&self.0.world, &self.0.mesh, self.ranks(), devices, f)
    }

    /// Does something before the launch; if it fails here, the run fails everywhere, with its alternate (`{:#}`) text.
    ///
    /// # Errors
    /// Its own.
    pub fn attempt<T, E: Display>(&self, f: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        f().inspect_err(|error| {
            self.0.world.fail(self.0.ranks.start, FailureCause::Error(format!("{error:#}")));
            // Who ends before the others have heard of the failure is gone for them.
            self.0.world.end();
        })
    }

    /// Does something before the launch that process 0 must do before the others, so that its files are there for them.
    /// If it fails anywhere, the run fails everywhere. `name` is as for a [`channel`](Self::channel).
    ///
    /// # Errors
    /// Its own; or, as `E` from a [`RunError`], that of another process.
    pub fn first_then_others<T, E: Display + From<RunError>>(
        &self,
        name: &str,
        f: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let channel = self.channel(name);
        if !self.is_first() {
            channel.all_gather(&())?;
        }
        let done = self.attempt(f)?;
        if self.is_first() {
            channel.all_gather(&())?;
        }
        Ok(done)
    }

    /// What process 0 computes before the launch, in all processes. If it fails there, the run fails
    /// everywhere. `name` is as for a [`channel`](Self::channel).
    ///
    /// # Errors
    /// In process 0 its own; in the others, as `E` from a [`RunError`], the same.
    pub fn from_first<T, E>(&self, name: &str, f: impl FnOnce() -> Result<T, E>) -> Result<T, E>
    where
        T: Serialize + DeserializeOwned,
        E: Display + From<RunError>,
    {
        let own: Vec<T> = if self.is_first() { vec![self.attempt(f)?] } else { Vec::new() };
        let mut all = self.channel(name).all_gather(&own)?;
        Ok(all.swap_remove(0).pop().expect("process 0 brings its value"))
    }

    /// Gathers values of all processes from any thread, independently of the groups of ranks. Each name may be asked
    /// for once.
    pub fn channel(&self, name: &str) -> ProcessChannel {
        ProcessChannel { joined: self.0.clone(), name: name.into(), sequence: Arc::default() }
    }
}

impl Drop for Joined {
    fn drop(&mut self) {
        self.world.close();
    }
}

/// Gathers values of all processes, whatever their ranks do meanwhile.
#[derive(Clone)]
pub struct ProcessChannel {
    joined: Arc<Joined>,
    name: String,
    /// Locked during a gather: they are numbered, and all processes must make them in the same order.
    sequence: Arc<Mutex<u64>>,
}

impl ProcessChannel {
    /// Every process's value, in the order of the processes.
    ///
    /// # Errors
    /// The first failure of the run: a gather that a process will never call does not wait.
    pub fn all_gather<T: Serialize + DeserializeOwned>(&self, value: &T) -> Result<Vec<T>, RunError> {
        let mut sequence = self.sequence.lock();
        let all = self.joined.world.gather(&self.name, *sequence, to_bytes(value))?;
        *sequence += 1;
        let read = |(process, bytes): (usize, &Arc<Vec<u8>>)| {
            let wrong = |what| self.joined.world.reject(process, format!("it has sent {}: {what}", self.name));
            from_bytes(bytes).map_err(wrong)
        };
        all.iter().enumerate().map(read).collect()
    }

    /// Whether this is process 0.
    pub fn is_first(&self) -> bool {
        self.joined.process == 0
    }

    /// Processes that take part.
    pub fn count(&self) -> usize {
        self.joined.processes
    }
}
