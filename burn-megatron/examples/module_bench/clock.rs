//! The time of the first rank's steps, who was busy meanwhile, and with `+profile` which kernels ran.

use backend_dist::gpu::profile::{Profile, Session, readable};
use backend_dist::local::is_logical;
use backend_dist::mesh_backend::{Report, explain};
use burn::tensor::{Device, Tensor};
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::fs;
use std::sync::{Arc, Barrier};
use std::thread::{self, ThreadId};
use std::time::Instant;

/// Steps before those that are timed, and these.
pub const STEPS: [usize; 2] = [4, 20];

/// A step, on average.
pub struct Step {
    pub seconds: f64,
    /// What the logical device did in all of them.
    pub report: Report,
    /// Threads of the process and for how many seconds of a step they ran, the busiest first.
    pub threads: Vec<(String, f64)>,
}

struct Clock {
    /// Threads that train, the first of which is timed, and the steps that they have begun.
    steps: Vec<(ThreadId, usize)>,
    barrier: Arc<Barrier>,
    marks: Vec<Mark>,
    profile: Option<Session>,
}

/// The beginning or the end of what is timed.
struct Mark {
    at: Instant,
    report: Report,
    threads: BTreeMap<String, f64>,
}

fn clock() -> MutexGuard<'static, Option<Clock>> {
    static CLOCK: Mutex<Option<Clock>> = Mutex::new(None);
    CLOCK.lock()
}

/// So many data-parallel ranks are about to train.
pub fn start(ranks: usize) {
    let is_profiled = std::env::args().any(|argument| argument.contains("+profile"));
    let profile = is_profiled.then(|| Session::start().expect("a profile needs a GPU"));
    *clock() = Some(Clock { steps: Vec::new(), barrier: Arc::new(Barrier::new(ranks)), marks: Vec::new(), profile });
}

/// A rank begins a step with the parameter `x`. Whether it is one after which the time is taken.
pub fn tick<const D: usize>(x: &Tensor<D>) -> bool {
    let (step, is_first, barrier) = clock().as_mut().expect("the clock was started").next();
    if [STEPS[0], STEPS[0] + STEPS[1]].contains(&step) {
        let device = x.device();
        device.sync().expect("the device runs");
        // A profile waits for all GPUs, which must not wait for ranks that wait for this one.
        barrier.wait();
        if is_first {
            clock().as_mut().expect("the clock was started").mark(&device);
        }
        barrier.wait();
    }
    is_first && step == STEPS[0] + STEPS[1]
}

impl Clock {
    /// The step that this thread begins, whether it is the first thread, and where all meet.
    fn next(&mut self) -> (usize, bool, Arc<Barrier>) {
        let rank = thread::current().id();
        let known = self.steps.iter().position(|(thread, _)| *thread == rank);
        let place = known.unwrap_or_else(|| {
            self.steps.push((rank, 0));
            self.steps.len() - 1
        });
        let step = self.steps[place].1;
        self.steps[place].1 += 1;
        (step, place == 0, self.barrier.clone())
    }

    fn mark(&mut self, device: &Device) {
        match self.profile.take() {
            Some(mut session) if self.marks.is_empty() => {
                session.begin().expect("GPUs run");
                self.profile = Some(session);
            }
            Some(session) => show(&session.end().expect("GPUs run")),
            None => {}
        }
        let report = if is_logical(device) { explain(device) } else { Report::default() };
        self.marks.push(Mark { at: Instant::now(), report, threads: threads() });
    }
}

/// The step of a training that has ended.
pub fn read() -> Option<Step> {
    let Clock { marks, .. } = clock().take()?;
    let [start, end] = &marks[..] else { return None };
    let each = |seconds: f64| seconds / STEPS[1] as f64;
    let ran = |(name, seconds): (&String, &f64)| {
        let before = start.threads.get(name).copied().unwrap_or_default();
        (name.clone(), each(seconds - before))
    };
    let mut threads: Vec<_> = end.threads.iter().map(ran).filter(|(_, seconds)| *seconds > 1e-3).collect();
    threads.sort_by(|a, b| b.1.total_cmp(&a.1));
    let seconds = each((end.at - start.at).as_secs_f64());
    Some(Step { seconds, report: end.report.since(&start.report), threads })
}

/// For how many seconds each thread of the process has run, by name; where the system does not say, none.
fn threads() -> BTreeMap<String, f64> {
    /// Of Linux, a second (`USER_HZ`).
    const TICKS: f64 = 100.0;
    let mut threads = BTreeMap::new();
    for thread in fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
        let Ok(stat) = fs::read_to_string(thread.path().join("stat")) else { continue };
        let (Some(open), Some(close)) = (stat.find('('), stat.rfind(')')) else { continue };
        // After the name comes the state; user and system time are the 14th and 15th fields.
        let fields = stat[close + 1..].split_whitespace().skip(11).take(2);
        let ticks: f64 = fields.filter_map(|field| field.parse::<f64>().ok()).sum();
        *threads.entry(stat[open + 1..close].to_string()).or_default() += ticks / TICKS;
    }
    threads
}

/// Milliseconds a step of the kernels that take most time.
fn show(profile: &Profile) {
    let mut kernels: BTreeMap<String, (usize, u64)> = BTreeMap::new();
    for span in &profile.spans {
        let name = readable(&span.name);
        let sum = kernels.entry(name.chars().take(60).collect()).or_default();
        *sum = (sum.0 + 1, sum.1 + span.end - span.start);
    }
    let mut kernels: Vec<_> = kernels.into_iter().collect();
    kernels.sort_by_key(|(_, (_, time))| std::cmp::Reverse(*time));
    let each = |time: u64| time as f64 * 1e-6 / STEPS[1] as f64;
    let busy = kernels.iter().map(|(_, (_, time))| time).sum();
    println!("{:>8.2} ms a step, {:.2} ms of kernels ({:?})", each(profile.window), each(busy), profile.source);
    for (name, (count, time)) in kernels.iter().take(24) {
        println!("{:>8.2} ms {:>6} {name}", each(*time), count / STEPS[1]);
    }
}
