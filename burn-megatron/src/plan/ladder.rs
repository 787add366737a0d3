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

/// From fast to frugal. Cutting the optimizer states costs nothing: a reduce-scatter and a gather send what an all-reduce
/// sends. ZeRO 2 adds a reduction per micro-batch, recomputation arithmetic, ZeRO 3 gathers and arithmetic.
pub fn ladder() -> Vec<Rung> {
    let selective = || Recompute {
        granularity: Granularity::Selective,
        modules: vec![Module::MlpActivation, Module::Norms],
        ..Recompute::default()
    };
    let full = || Recompute { granularity: Granularity::Full, ..Recompute::default() };
    let rung = |zero, recompute| Rung { zero, recompute };
    vec![
        rung(1, Recompute::default()),
        rung(2, Recompute::default()),
        rung(1, selective()),
        rung(2, selective()),
        rung(2, full()),
        rung(3, full()),
    ]
}

/// The first rung on which `job` needs at most `bytes` on every rank, with the bytes of the fullest; those before it were
/// too large.
pub fn first_that_fits(job: &Job, bytes: u64) -> Option<(Rung, u64)> {
    ladder().into_iter().find_map(|rung| {
        let peak = peak(&on(job, &rung))?;
        (peak <= bytes).then_some((rung, peak))
    })
}

/// The job with a rung's settings.
pub fn on(job: &Job, rung: &Rung) -> Job {
    let mut job = job.clone();
    job.layout.zero = rung.zero;
    job.recompute = rung.recompute.clone();
    job
}

/// Bytes of the fullest rank; `None` where the schedule does not exist.
pub fn peak(job: &Job) -> Option<u64> {
    let schedule = Schedule::new(job.schedule).ok()?;
    memory(job, &schedule).iter().map(|rank| rank.peak()).max()
}
