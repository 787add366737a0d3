//! The world after its processes have met.

use super::{JoinError, ProcessWorld, host_name};
use crate::comm::remote::{Introduction, Peer, Remote, meet_at};
use crate::comm::{FailureCause, RunError, World, from_bytes, to_bytes};
use crate::launch::{BoxError, Rank, launch_in, place};
use crate::mesh::Mesh;
use burn::tensor::Device;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt::Display;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// Of what processes exchange, the version: two that differ do not go together.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// All processes of a world, as one of them sees it; also of a world of one. Made for one [`launch`](Self::launch);
/// dropping it ends the connections, and with them the run of any process that has not finished.
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
        let world = World::new(ranks.clone().map(|rank| place(mesh, rank)).collect());
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

    /// Waits until all processes are there. They must be of the same version, have the same layout, and the same
    /// `agreement`: names with values, for example the text of a configuration.
    ///
    /// # Errors
    /// If somebody does not come in time, or the processes differ; the same words in all that came.
    pub fn join(world: &ProcessWorld, mesh: &Mesh, agreement: &[(&str, String)]) -> Result<Self, JoinError> {
        let (ranks, processes, layout) = (mesh.world_size(), world.processes, mesh.layout().to_string());
        let layout_and_version = [("version", VERSION.to_string()), ("layout", layout.clone())];
        let agreement = layout_and_version.iter().chain(agreement);
        let me = Introduction {
            process: world.process,
            processes,
            host: host_name(),
            agreement: agreement.map(|(name, value)| (name.to_string(), value.clone())).collect(),
        };
        let Some(share) = world.share(ranks) else {
            let divisors = (1..=ranks).filter(|size| ranks.is_multiple_of(*size));
            let nearest = divisors.min_by_key(|size| size.abs_diff(processes)).unwrap_or(1);
            return Err(JoinError::Division { ranks, layout, processes, nearest });
        };
        let (streams, hosts) = meet_at(world, &me)?;
        let peer = |stream: Option<_>| stream.map(|stream| Peer::new(stream, world.silence)).transpose();
        let peers = streams.into_iter().map(peer).collect::<Result<_, _>>();
        let peers = peers.map_err(|error| JoinError::Refused(format!("a connection ended at once: {error}")))?;
        let (process, silence) = (world.process, world.silence);
        let remote = Remote { process, share, hosts, silence, peers, hub: Mutex::default() };
        let shared = World::over((0..ranks).map(|rank| place(mesh, rank)).collect(), Some(remote));
        shared.listen();
        let ranks = process * share..(process + 1) * share;
        let (mesh, local) = (mesh.clone(), world.local);
        Ok(Self(Arc::new(Joined { mesh, process, processes, ranks, local, world: shared })))
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
    /// [`launch`](crate::launch::launch) does in a world of one process. The rank at place `i` of this process owns
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

    /// What process 0 makes of something before the launch, in all processes. If it fails there, the run fails
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

    /// A way to exchange values between processes beside the groups of ranks, from any thread. Each name may be asked
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

/// Where processes exchange values, whatever their ranks do meanwhile.
#[derive(Clone)]
pub struct ProcessChannel {
    joined: Arc<Joined>,
    name: String,
    /// Held during an exchange: they are numbered, and all processes must make them in the same order.
    sequence: Arc<Mutex<u64>>,
}

impl ProcessChannel {
    /// Every process's value, in the order of the processes.
    ///
    /// # Errors
    /// The first failure of the run: an exchange that somebody will never come to does not wait.
    ///
    /// # Panics
    /// If a value of another process is none of this type.
    pub fn all_gather<T: Serialize + DeserializeOwned>(&self, value: &T) -> Result<Vec<T>, RunError> {
        let mut sequence = self.sequence.lock().unwrap_or_else(PoisonError::into_inner);
        let all = self.joined.world.gather(&self.name, *sequence, to_bytes(value))?;
        *sequence += 1;
        let read = |bytes: &Arc<Vec<u8>>| from_bytes(bytes).unwrap_or_else(|what| panic!("{}: {what}", self.name));
        Ok(all.iter().map(read).collect())
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
