//! Runs one closure on every rank of a mesh, a thread per rank, and turns the first failure into an error.

mod panics;

use crate::attached::{Attached, Attachments};
use crate::comm::{Aborted, FailureCause, Group, RunError, World};
use crate::gpu;
use crate::memory;
use crate::mesh::{Axis, Coords, Mesh, ParallelLayout};
use crate::process::Processes;
use crate::startup;
use burn::tensor::Device;
use panics::{RankPanics, enter_rank, panic_message};
use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

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
}

impl Rank {
    /// Runs `work` on another thread of this rank: its memory is the rank's, and if it panics, the rank has failed before
    /// what `work` holds is dropped.
    ///
    /// # Panics
    /// If the system starts no more threads.
    pub fn spawn(&self, name: &str, mut work: impl FnMut() + Send + 'static) {
        let (rank, device, world) = (self.rank, self.device.clone(), self.world.clone());
        #[cfg(feature = "cuda")]
        let under_way = crate::failed::Entered::of_this_thread();
        let run = move || {
            enter_rank();
            memory::set_rank(Some(rank));
            #[cfg(feature = "cuda")]
            under_way.enter();
            if let Err(payload) = catch_unwind(AssertUnwindSafe(&mut work)) {
                fail_with(&world, rank, &device, payload.as_ref());
            }
        };
        let started = std::thread::Builder::new().name(format!("rank {rank} {name}")).spawn(run);
        started.unwrap_or_else(|error| panic!("its thread `{name}`: {}", thread_error(&error)));
    }

    /// Whether one process hosts this rank and `other`.
    pub fn is_in_same_process(&self, other: usize) -> bool {
        self.world.process_of(self.rank) == self.world.process_of(other)
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

/// Runs `f` once per rank of `mesh`, each on its own thread of this process, and returns the results in rank order. For
/// ranks of several processes see [`Processes::launch`](crate::process::Processes::launch).
///
/// Rank `r` owns `devices[r % devices.len()]`; CPU ranks share one device value.
///
/// ```
/// use ranks::{launch::launch, mesh::{Axis, Mesh}};
/// use burn::tensor::Device;
///
/// let mesh = Mesh::new("DP3".parse()?)?;
/// let ranks = launch(&mesh, &[Device::flex()], |rank| Ok(rank.group(Axis::Dp).all_gather_host(10 * rank.rank)))?;
/// assert_eq!(ranks, [[0, 10, 20]; 3]);
///
/// let error = launch(&mesh, &[Device::flex()], |rank| match rank.rank {
///     2 => Err("no data".into()),
///     _ => Ok(rank.group(Axis::Dp).barrier()),
/// });
/// assert!(error.unwrap_err().to_string().starts_with("rank 2 (dp 2) failed: no data"));
/// # Ok::<(), ranks::launch::BoxError>(())
/// ```
///
/// # Errors
/// The first failure: a rank that panics, returns an error, issues another operation than its peers, waits for a rank
/// that has finished, or waits in a circle. All other ranks stop at their next operation.
pub fn launch<T: Send>(
    mesh: &Mesh,
    devices: &[Device],
    f: impl Fn(Rank) -> Result<T, BoxError> + Sync,
) -> Result<Vec<T>, RunError> {
    Processes::alone(mesh).launch(devices, f)
}

/// Runs the ranks `here` of `world`; the `i`-th of them owns `devices[i % devices.len()]`.
pub(crate) fn launch_in<T: Send>(
    world: &Arc<World>,
    mesh: &Mesh,
    here: Range<usize>,
    devices: &[Device],
    f: impl Fn(Rank) -> Result<T, BoxError> + Sync,
) -> Result<Vec<T>, RunError> {
    assert!(!devices.is_empty(), "a launch needs at least one device");
    #[cfg(feature = "cuda")]
    if devices.iter().any(|device| *device != Device::flex()) {
        crate::gpu::allocator::choose();
        crate::cuda::watch::begin();
        let is_taken = |(i, device): (usize, &Device)| devices[..i].contains(device);
        if here.len() > devices.len() || devices.iter().enumerate().any(is_taken) {
            world.links.share_gpus();
        }
    }
    #[cfg(feature = "cuda")]
    let under_way = crate::failed::Launch::begin();
    let (launched, program) = (Instant::now(), startup::program_seconds());
    let _hook = RankPanics::store();
    let mesh = Arc::new(mesh.clone());
    let run = |rank: usize| {
        let device = devices[(rank - here.start) % devices.len()].clone();
        let context = Rank::new(rank, mesh.clone(), device.clone(), world.clone());
        enter_rank();
        memory::set_rank(Some(rank));
        #[cfg(feature = "cuda")]
        under_way.enter();
        startup::begin(launched, program);
        let attached = context.attached.clone();
        let result = catch_unwind(AssertUnwindSafe(|| {
            let result = f(context);
            if result.is_ok() {
                attached.finish();
            }
            result
        }));
        match result {
            Ok(Ok(value)) => {
                world.finish(rank);
                Some(value)
            }
            Ok(Err(error)) => {
                let message = chain(error.as_ref());
                world.fail(rank, FailureCause::Error(gpu::out_of_memory(&message, &device).unwrap_or(message)));
                None
            }
            Err(payload) => {
                fail_with(world, rank, &device, payload.as_ref());
                None
            }
        }
    };
    let results: Vec<Option<T>> = std::thread::scope(|scope| {
        let run = &run;
        let start = |rank: usize| {
            let started = rank_thread(rank).spawn_scoped(scope, move || {
                let _ended = Ended(world);
                run(rank)
            });
            let ranks = here.len();
            started
                .inspect_err(|error| {
                    let what = format!(
                        "its thread cannot be started, and {ranks} ranks need one each: {}",
                        thread_error(error)
                    );
                    world.fail(rank, FailureCause::Error(what));
                })
                .ok()
        };
        // Those that have been started stop at their next operation.
        let threads: Vec<_> = here.clone().map_while(start).collect();
        world.wait_for_threads(threads.len());
        threads.into_iter().map(|thread| thread.join().unwrap_or(None)).collect()
    });
    let failure = world.end();
    #[cfg(feature = "cuda")]
    {
        // Where no rank has ended its clock.
        crate::cuda::watch::kernels();
        world.links.close(failure.is_some());
    }
    match failure {
        Some(failure) => Err(failure),
        None => Ok(results.into_iter().map(|value| value.expect("no failure means a value from every rank")).collect()),
    }
}

/// Says that the thread of a rank has ended, however it does.
struct Ended<'a>(&'a World);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.note_ended_thread();
    }
}

/// The failure of `rank`, on `device`, whose thread has panicked with `payload`.
fn fail_with(world: &World, rank: usize, device: &Device, payload: &(dyn Any + Send)) {
    if payload.is::<Aborted>() {
        return;
    }
    let message = panic_message(payload);
    let explained = gpu::out_of_memory(&message, device).map(FailureCause::Error);
    world.fail(rank, explained.unwrap_or(FailureCause::Panic(message)));
}

fn rank_thread(rank: usize) -> std::thread::Builder {
    let builder = std::thread::Builder::new().name(format!("rank {rank}"));
    #[cfg(test)]
    let builder = tests::with_test_stack(builder, rank);
    builder
}

/// Why the system starts no more threads: its own words, and the limits that may be the cause.
pub(crate) fn thread_error(error: &std::io::Error) -> String {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let limit = |name: &str| {
        let values = limits.lines().find_map(|line| line.strip_prefix(name));
        values.and_then(|values| values.split_whitespace().next()).unwrap_or("unknown").to_string()
    };
    let (threads, memory) = (limit("Max processes"), limit("Max address space"));
    format!(
        "{error}; limits: {threads} processes and threads of this user (ulimit -u), {memory} bytes of address space \
         (ulimit -v)"
    )
}

/// The error and its sources in one line.
fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::thread::Builder;

    thread_local! {
        /// The first rank whose thread asks for more memory than any system has.
        static TOO_MANY_FROM: Cell<usize> = const { Cell::new(usize::MAX) };
    }

    pub(super) fn with_test_stack(builder: Builder, rank: usize) -> Builder {
        if rank < TOO_MANY_FROM.get() { builder } else { builder.stack_size(1 << 60) }
    }

    #[test]
    fn a_rank_whose_thread_cannot_be_started_is_an_error_with_the_limits() {
        for first in [0, 2] {
            TOO_MANY_FROM.set(first);
            let mesh = Mesh::new(ParallelLayout { tp: 2, dp: 2, ..Default::default() }).unwrap();
            let error = launch(&mesh, &[Device::flex()], |rank| {
                rank.group(Axis::World).barrier();
                Ok(())
            });
            TOO_MANY_FROM.set(usize::MAX);
            let error = error.unwrap_err();
            assert_eq!(error.rank, first);
            let text = error.to_string();
            assert!(text.contains("its thread cannot be started, and 4 ranks need one each"), "{text}");
            assert!(text.contains("(ulimit -u)") && text.contains("(ulimit -v)"), "{text}");
        }
    }
}
