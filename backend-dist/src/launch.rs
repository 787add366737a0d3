//! Runs one closure on every rank of a mesh, a thread per rank, and turns the first failure into an error.

use crate::comm::{Aborted, FailureCause, Group, RunError, World};
use crate::gpu;
use crate::memory;
use crate::mesh::{Axis, Coords, Mesh, ParallelLayout};
use crate::process::Processes;
use crate::startup;
use burn::tensor::Device;
use std::any::Any;
use std::cell::RefCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind, set_hook, take_hook};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// Any error a rank may return.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// What a rank knows of itself: its place in the mesh, its device and its groups.
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
}

impl Rank {
    /// The only rank of a world of one, on the calling thread.
    pub fn single(device: Device) -> Self {
        let mesh = Arc::new(Mesh::new(ParallelLayout::default()).expect("the layout of one device is legal"));
        Self { rank: 0, coords: mesh.coords(0), mesh, device, world: World::new(vec![String::new()]) }
    }

    /// This rank's handle on its group along `axis`.
    pub fn group(&self, axis: Axis) -> Group {
        Group::new(&self.world, &axis.to_string(), &self.mesh.group_of(axis, self.rank), self.rank)
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
}

impl Rank {
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

/// Runs the ranks `here` of `world`; the one at place `i` among them owns `devices[i % devices.len()]`.
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
        crate::cuda::allocator::choose();
        crate::cuda::watch::begin();
        let is_taken = |(i, device): (usize, &Device)| devices[..i].contains(device);
        if here.len() > devices.len() || devices.iter().enumerate().any(is_taken) {
            world.links.share_gpus();
        }
    }
    #[cfg(feature = "cuda")]
    let under_way = crate::failed::Launch::begin();
    let (launched, program) = (Instant::now(), startup::program_seconds());
    let _hook = RankPanics::keep();
    let mesh = Arc::new(mesh.clone());
    let run = |rank: usize| {
        let device = devices[(rank - here.start) % devices.len()].clone();
        let explained = {
            let device = device.clone();
            move |message: String| gpu::out_of_memory(&message, &device).ok_or(message)
        };
        let context = Rank { rank, coords: mesh.coords(rank), mesh: mesh.clone(), device, world: world.clone() };
        IS_RANK.with_borrow_mut(|last| *last = Some(String::new()));
        memory::set_rank(Some(rank));
        #[cfg(feature = "cuda")]
        under_way.enter();
        startup::begin(launched, program);
        let result = catch_unwind(AssertUnwindSafe(|| f(context)));
        match result {
            Ok(Ok(value)) => {
                world.finish(rank);
                Some(value)
            }
            Ok(Err(error)) => {
                let message = explained(chain(error.as_ref())).unwrap_or_else(|other| other);
                world.fail(rank, FailureCause::Error(message));
                None
            }
            Err(payload) => {
                if !payload.is::<Aborted>() {
                    let cause = explained(panic_message(payload.as_ref())).map(FailureCause::Error);
                    world.fail(rank, cause.unwrap_or_else(FailureCause::Panic));
                }
                None
            }
        }
    };
    let results: Vec<Option<T>> = std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = here
            .clone()
            .map(|rank| {
                let builder = std::thread::Builder::new().name(format!("rank {rank}"));
                builder.spawn_scoped(scope, move || run(rank)).expect("the system can start a thread per rank")
            })
            .collect();
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

thread_local! {
    /// `Some` on rank threads: the message and place of the last panic.
    static IS_RANK: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// While it lives, panics of rank threads are kept instead of printed: `launch` reports them once, with the rank's
/// name; printing them from the thread as well would tear the dashboard. Launches may overlap; the last one to end puts
/// the previous hook back.
struct RankPanics;

type Hook = Box<dyn Fn(&PanicHookInfo<'_>) + Sync + Send>;

/// Launches under way, and the hook that was there before them.
static PREVIOUS: Mutex<(usize, Option<Arc<Hook>>)> = Mutex::new((0, None));

impl RankPanics {
    fn keep() -> Self {
        let mut state = PREVIOUS.lock().unwrap_or_else(PoisonError::into_inner);
        if state.0 == 0 {
            let previous = Arc::new(take_hook());
            state.1 = Some(previous.clone());
            set_hook(Box::new(move |info| {
                if !keep_on_rank_thread(info) {
                    previous(info);
                }
            }));
        }
        state.0 += 1;
        Self
    }
}

impl Drop for RankPanics {
    fn drop(&mut self) {
        let mut state = PREVIOUS.lock().unwrap_or_else(PoisonError::into_inner);
        state.0 -= 1;
        // A panicking thread may not change the hook; ours then stays, and passes on what is not a rank's.
        if state.0 == 0 && !std::thread::panicking() {
            drop(take_hook());
            if let Some(previous) = state.1.take().and_then(Arc::into_inner) {
                set_hook(previous);
            }
        }
    }
}

/// Keeps message and place if this is a rank's thread.
fn keep_on_rank_thread(info: &PanicHookInfo<'_>) -> bool {
    IS_RANK.with_borrow_mut(|last| {
        let Some(last) = last else { return false };
        let message = info.payload_as_str().unwrap_or("no message");
        *last = match info.location() {
            Some(location) => format!("{message} (at {}:{})", location.file(), location.line()),
            None => message.to_string(),
        };
        true
    })
}

fn panic_message(payload: &(dyn Any + Send)) -> String {
    let kept = IS_RANK.with_borrow_mut(|last| last.as_mut().map(std::mem::take)).unwrap_or_default();
    if !kept.is_empty() {
        return kept;
    }
    let text = payload.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
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
pub fn place(mesh: &Mesh, rank: usize) -> String {
    let (layout, at) = (mesh.layout(), mesh.coords(rank));
    [("pp", layout.pp, at.pp), ("dp", layout.dp, at.dp), ("cp", layout.cp, at.cp), ("tp", layout.tp, at.tp)]
        .iter()
        .filter(|(_, size, _)| *size > 1)
        .map(|(name, _, index)| format!("{name} {index}"))
        .collect::<Vec<_>>()
        .join(", ")
}
