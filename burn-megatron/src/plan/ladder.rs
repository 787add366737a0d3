//! What to give up for memory, in the order of what it costs.

use models::recompute::{Granularity, Module, Recompute};

use super::{Job, memory};
use crate::schedule::Schedule;

/// A ZeRO stage and what is computed again.
#[derive(Clone, Debug, PartialEq)]
pub struct Rung {
    /// What is cut over the replicas.
    pub zero: u8,
    /// What the backward pass computes again.
    pub recompute: Recompute,
}

/// From fast to frugal. Cutting the optimizer states costs nothing: a reduce-scatter and a gather send what an
/// all-reduce sends. ZeRO 2 adds a reduction per micro-batch, recomputation arithmetic, ZeRO 3 gathers and arithmetic.
pub fn ladder() -> Vec<Rung> {
    let selective = || Recompute {
        granularity: Granularity::Selective,
        modules: vec![Module::MlpActivation, Module::Norms],
        ..Recompute::default()
    };
    let full = |keep_attention| Recompute { granularity: Granularity::Full, keep_attention, ..Recompute::default() };
    let rung = |zero, recompute| Rung { zero, recompute };
    vec![
        rung(1, Recompute::default()),
        rung(2, Recompute::default()),
        rung(1, selective()),
        rung(2, selective()),
        rung(2, full(true)),
        rung(2, full(false)),
        rung(3, full(true)),
        rung(3, full(false)),
    ]
}

/// The share of a GPU's memory that a plan may fill; the rest is for what plans do not see.
const FILLED: f64 = 0.95;

/// The job on the first rung on which every rank fits into a GPU of `bytes`; `zero` if the ZeRO stage is given.
pub fn first_that_fits(job: &Job, zero: Option<u8>, bytes: u64) -> Option<Job> {
    first_of(std::slice::from_ref(job), zero, bytes).map(|(_, job)| job)
}

/// The first rung on which any of the jobs fits: the index of the first one that does, and it on that rung.
pub fn first_of(jobs: &[Job], zero: Option<u8>, bytes: u64) -> Option<(usize, Job)> {
    let rungs = ladder().into_iter().map(|rung| Rung { zero: zero.unwrap_or(rung.zero), ..rung });
    let mut all =
        rungs.flat_map(|rung| jobs.iter().enumerate().map(move |(index, job)| (index, on(job, rung.clone()))));
    all.find(|(_, job)| fits(job, bytes))
}

/// Whether every rank fits into a GPU of `bytes`.
pub fn fits(job: &Job, bytes: u64) -> bool {
    peak(job).is_some_and(|peak| peak <= (bytes as f64 * FILLED) as u64)
}

/// The job with a rung's settings; without replicas there is nothing to cut.
fn on(job: &Job, rung: Rung) -> Job {
    let mut job = job.clone();
    job.layout.zero = if job.replicas() > 1 { rung.zero } else { 0 };
    job.recompute = rung.recompute;
    job
}

/// Bytes of the fullest rank; `None` where the schedule does not exist.
pub fn peak(job: &Job) -> Option<u64> {
    let job = job.fullest_rows();
    let schedule = Schedule::new(job.schedule).ok()?;
    memory(&job, &schedule).iter().map(|rank| rank.peak()).max()
}
