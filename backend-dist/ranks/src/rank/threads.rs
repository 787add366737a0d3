//! The threads of a process's ranks, and how a rank fails.

use super::panics::{RankPanics, enter_rank, panic_message};
use super::{BoxError, Rank};
use crate::comm::{Aborted, FailureCause, RunError, World};
use crate::{memory, mesh::Mesh, startup};
use burn::tensor::Device;
use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

impl Rank {
    /// Runs `work` on another thread of this rank: its memory is the rank's, and if it panics, the rank has failed before
    /// what `work` holds is dropped.
    ///
    /// # Panics
    /// If the system starts no more threads.
    pub fn spawn(&self, name: &str, mut work: impl FnMut() + Send + 'static) {
        let (rank, device, world) = (self.rank, self.device.clone(), self.world.clone());
        #[cfg(feature = "cuda")]
        let under_way = gpu::failed::Entered::of_this_thread();
        let run = move || {
            enter_rank();
            memory::set_rank(Some(rank));
            #[cfg(feature = "cuda")]
            under_way.enter();
            if let Err(payload) = catch_unwind(AssertUnwindSafe(&mut work)) {
                fail_with(&world, rank, &device, payload.as_ref());
            }
            world.note_left();
        };
        let started = std::thread::Builder::new().name(format!("rank {rank} {name}")).spawn(run);
        started.unwrap_or_else(|error| panic!("its thread `{name}`: {}", thread_error(&error)));
    }
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
        gpu::allocator::choose();
        gpu::cuda::watch::begin();
        let is_taken = |(i, device): (usize, &Device)| devices[..i].contains(device);
        if here.len() > devices.len() || devices.iter().enumerate().any(is_taken) {
            world.links.share_gpus();
        }
    }
    #[cfg(feature = "cuda")]
    let under_way = gpu::failed::Launch::begin();
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
        gpu::cuda::watch::kernels();
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::launch;
    use crate::mesh::{Axis, ParallelLayout};
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
