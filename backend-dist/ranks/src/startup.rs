//! The time between the start of the program and the end of a rank's first step, by phase.
//!
//! A rank's thread is in one [`Phase`] at a time, so phases add up to the total. Kernels are compiled and GEMMs planned
//! on the threads of the devices, while ranks launch work or wait for it: that time is included in the phases.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::time::Instant;

use serde::{Deserialize, Serialize};

/// A phase of a rank's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// From the start of the program to the launch of the ranks.
    Program,
    /// The device's context.
    Device,
    /// Communicators with other GPUs.
    Connect,
    /// Initial weights, sampled or read, until they are on the device.
    Weights,
    /// Masters, moments and gradients.
    Buffers,
    /// The state of a checkpoint.
    Checkpoint,
    /// The first batch.
    Batch,
    /// The first step.
    Step,
    /// Everything else.
    Other,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Self::Program => "program",
            Self::Device => "device",
            Self::Connect => "NCCL",
            Self::Weights => "weights",
            Self::Buffers => "buffers",
            Self::Checkpoint => "checkpoint",
            Self::Batch => "batch",
            Self::Step => "first step",
            Self::Other => "other",
        })
    }
}

/// Kernels of all GPUs of this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Kernels {
    /// Those that were compiled.
    pub count: usize,
    /// Those that were loaded from disk.
    pub cached: usize,
}

/// GEMMs of all GPUs of this process whose algorithms were chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GemmPlans {
    /// Number of GEMMs.
    pub count: usize,
    /// Seconds of all threads.
    pub seconds: f64,
}

/// The start of a rank.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Startup {
    /// Seconds of every phase that took any, which add up to the total.
    pub phases: BTreeMap<Phase, f64>,
    /// Bytes of weights that this rank has read.
    #[serde(default)]
    pub read: u64,
    /// Compiled or loaded.
    pub kernels: Kernels,
    /// Planned.
    pub gemms: GemmPlans,
}

impl Startup {
    /// From the start of the program to the end of the first step.
    pub fn seconds(&self) -> f64 {
        self.phases.values().sum()
    }
}

/// `started in 13.0 s: first step 8.1, NCCL 2.1, weights 1.1 (2.4 GB read), …; 82 kernels compiled, 44 from disk; 46 GEMMs
/// planned in 0.4 s`
impl fmt::Display for Startup {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let mut phases: Vec<_> = self.phases.iter().filter(|(_, seconds)| **seconds >= 0.05).collect();
        phases.sort_by(|a, b| b.1.total_cmp(a.1));
        let read = |phase: &Phase| match phase {
            Phase::Weights if self.read > 0 => format!(" ({:.1} GB read)", self.read as f64 / 1e9),
            _ => String::new(),
        };
        let phases: Vec<String> =
            phases.iter().map(|(phase, seconds)| format!("{phase} {seconds:.1}{}", read(phase))).collect();
        write!(f, "started in {:.1} s", self.seconds())?;
        if !phases.is_empty() {
            write!(f, ": {}", phases.join(", "))?;
        }
        let Self { kernels, gemms, .. } = self;
        if kernels.count + kernels.cached > 0 {
            write!(f, "; {} kernels compiled, {} from disk", kernels.count, kernels.cached)?;
        }
        if gemms.count > 0 {
            write!(f, "; {} GEMMs planned in {:.1} s", gemms.count, gemms.seconds)?;
        }
        Ok(())
    }
}

/// The present phase of a rank's thread, its start, the seconds of earlier ones, and the bytes of weights that were read.
struct Clock {
    now: Phase,
    since: Instant,
    seconds: BTreeMap<Phase, f64>,
    read: u64,
}

impl Clock {
    fn enter(&mut self, phase: Phase) -> Phase {
        let now = Instant::now();
        *self.seconds.entry(self.now).or_default() += (now - self.since).as_secs_f64();
        self.since = now;
        std::mem::replace(&mut self.now, phase)
    }
}

thread_local! {
    /// `Some` on a rank's thread until its first step has ended.
    static CLOCK: RefCell<Option<Clock>> = const { RefCell::new(None) };
}

/// Starts the clock of the calling rank's thread; `launched` is the time of the launch of the ranks, `program` the
/// seconds before it since the start of the program.
pub(crate) fn begin(launched: Instant, program: f64) {
    let seconds = BTreeMap::from([(Phase::Program, program)]);
    CLOCK.set(Some(Clock { now: Phase::Other, since: launched, seconds, read: 0 }));
}

/// Runs `work`, whose time, except for nested phases, counts as `phase` of the calling rank.
pub fn phase<T>(phase: Phase, work: impl FnOnce() -> T) -> T {
    let enter = |phase| CLOCK.with_borrow_mut(|clock| clock.as_mut().map(|clock| clock.enter(phase)));
    let Some(before) = enter(phase) else { return work() };
    let done = work();
    enter(before);
    done
}

/// The calling rank has read so many bytes of weights.
pub fn note_read(bytes: usize) {
    CLOCK.with_borrow_mut(|clock| clock.iter_mut().for_each(|clock| clock.read += bytes as u64));
}

/// Ends the clock of the calling rank after its first step; `None` later, and outside of ranks.
pub fn end() -> Option<Startup> {
    let mut clock = CLOCK.take()?;
    clock.enter(Phase::Other);
    #[cfg(feature = "cuda")]
    let ((count, cached), (plans, seconds)) = (gpu::cuda::watch::kernels(), gpu::cuda::watch::gemms());
    #[cfg(not(feature = "cuda"))]
    let ((count, cached), (plans, seconds)) = Default::default();
    let (kernels, gemms) = (Kernels { count, cached }, GemmPlans { count: plans, seconds });
    Some(Startup { phases: clock.seconds, read: clock.read, kernels, gemms })
}

/// Seconds since this program was started; zero if the system does not tell.
pub fn program_seconds() -> f64 {
    // `starttime` is field 22 of proc(5)'s stat, in ticks of 1/100 s since boot (`sysconf(_SC_CLK_TCK)` is 100 on
    // Linux); the name, field 2, may contain spaces.
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let started = || -> Option<f64> {
        let stat = read("/proc/self/stat")?;
        let ticks: f64 = stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()?;
        let uptime: f64 = read("/proc/uptime")?.split_whitespace().next()?.parse().ok()?;
        Some(uptime - ticks / 100.0)
    };
    started().unwrap_or(0.0).max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn pause() {
        std::thread::sleep(Duration::from_millis(20));
    }

    #[test]
    fn phases_within_phases_add_up_to_the_whole() {
        let start = Instant::now();
        begin(start, 1.5);
        let value = phase(Phase::Weights, || {
            note_read(3);
            pause();
            note_read(4);
            phase(Phase::Connect, pause);
            pause();
            7
        });
        let (whole, seen) = (1.5 + start.elapsed().as_secs_f64(), end().unwrap());
        assert_eq!((value, seen.read), (7, 7));
        assert!((seen.seconds() - whole).abs() < 0.01, "{whole} s: {seen:?}");
        assert!(seen.phases[&Phase::Connect] >= 0.02 && seen.phases[&Phase::Weights] >= 0.04, "{seen:?}");
        assert!(seen.phases[&Phase::Weights] < whole - 1.5 - 0.02, "{seen:?}");
        assert_eq!(end(), None, "a rank starts once");
        phase(Phase::Step, pause);
        assert_eq!(end(), None);
    }

    #[test]
    fn the_line_names_what_took_longest_first() {
        let phases = BTreeMap::from([(Phase::Connect, 2.1), (Phase::Weights, 14.2), (Phase::Batch, 0.001)]);
        let (kernels, gemms) = (Kernels { count: 82, cached: 3 }, GemmPlans { count: 46, seconds: 0.4 });
        let started = Startup { phases, read: 2_400_000_000, kernels, gemms };
        let expected = "started in 16.3 s: weights 14.2 (2.4 GB read), NCCL 2.1; 82 kernels compiled, 3 from disk; \
                        46 GEMMs planned in 0.4 s";
        assert_eq!(started.to_string(), expected);
    }

    #[test]
    fn a_start_in_no_time_has_no_list_of_nothing() {
        let started = Startup { phases: BTreeMap::from([(Phase::Weights, 0.01)]), ..Startup::default() };
        assert_eq!(started.to_string(), "started in 0.0 s");
    }

    #[test]
    fn the_program_has_been_running_for_a_while() {
        let before = program_seconds();
        std::thread::sleep(Duration::from_millis(50));
        let after = program_seconds();
        assert!(after > before && after - before < 10.0, "{before} {after}");
    }
}
