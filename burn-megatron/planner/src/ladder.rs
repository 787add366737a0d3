//! Settings that save memory, in the order of their cost.

use layouts::recompute::{Granularity, Module, Recompute};

use super::state::BLOCK;
use super::{Job, Moments, StateBytes, memory};

/// A ZeRO stage and a recomputation.
#[derive(Clone, Debug, PartialEq)]
pub struct Rung {
    /// The ZeRO stage.
    pub zero: u8,
    /// The recomputation.
    pub recompute: Recompute,
}

/// From fast to frugal. Sharding the optimizer states costs nothing: a reduce-scatter and an all-gather send as
/// much as an all-reduce. ZeRO 2 adds a reduction per micro-batch, recomputation adds arithmetic, which hides that inputs of
/// layers wait on the host, ZeRO 3 adds gathers.
pub fn ladder() -> Vec<Rung> {
    let selective = || Recompute {
        granularity: Granularity::Selective,
        modules: vec![Module::MlpActivation, Module::Norms],
        ..Recompute::default()
    };
    let full = |keep_attention| Recompute { keep_attention, ..Recompute::full() };
    let offloaded = || Recompute { cpu_offload: true, ..Recompute::full() };
    let rung = |zero, recompute| Rung { zero, recompute };
    vec![
        rung(1, Recompute::default()),
        rung(2, Recompute::default()),
        rung(1, selective()),
        rung(2, selective()),
        rung(2, full(true)),
        rung(2, full(false)),
        rung(2, offloaded()),
        rung(3, full(true)),
        rung(3, full(false)),
        rung(3, offloaded()),
    ]
}

/// Share of a GPU's memory that a plan may fill; the rest is for memory that plans do not count.
const FILLED: f64 = 0.95;

/// The first rung on which any of the jobs fits: the index of the first job that does, and the job on that rung.
pub fn first_of(jobs: &[Job], bytes: u64) -> Option<(usize, Job)> {
    let mut all = ladder()
        .into_iter()
        .flat_map(|rung| jobs.iter().enumerate().map(move |(index, job)| (index, on(job, rung.clone()))));
    all.find(|(_, job)| fits(job, bytes))
}

/// Optimizer states in fewer bits than fp32, and the type of their moments.
const SMALL_STATES: [(StateBytes, &str); 2] = [(StateBytes::BF16, "bf16"), (StateBytes::BITS8, "8bit")];

/// The key of states in host memory.
const OFFLOAD: &str = "optimizer.cpu-offload = true";

/// The job with the first smaller optimizer states, then with states in host memory, and, if it needs them, the first
/// settings with which it fits into GPUs of `bytes`; and the keys of these states. `None` if it fits with none, or cannot
/// have them: they are for AdamW, the smaller ones for weights in 16 bits, of which only bf16 has remainders.
pub fn with_small_states(job: &Job, bytes: u64) -> Option<(Job, String)> {
    let size = |states: &StateBytes| states.exp_avg + states.exp_avg_sq + BLOCK * states.main_params;
    let StateBytes { main_grads, main_params, ema, .. } = job.state_bytes;
    let with = |(states, dtype): (StateBytes, &str)| {
        let (main_params, remainders) = match job.bf16 {
            true => (states.main_params, "optimizer.main-params-dtype = bf16-remainder, "),
            false => (main_params, ""),
        };
        let keys = format!("{remainders}optimizer.exp-avg-dtype = {dtype} and optimizer.exp-avg-sq-dtype = {dtype}");
        (Job { state_bytes: StateBytes { main_grads, main_params, ema, ..states }, ..job.clone() }, keys)
    };
    let all = SMALL_STATES.into_iter().filter(|_| job.element == 2 && job.moments == Moments::ADAMW).map(with);
    let smaller: Vec<_> = all.filter(|(with, _)| size(&with.state_bytes) < size(&job.state_bytes)).collect();
    let can_offload = job.gpu && job.moments == Moments::ADAMW && job.offload < 1.0 && job.state_bytes.ema == 0;
    // Moments in 16 bits are half of the copies.
    let narrow = smaller.iter().find(|(job, _)| job.state_bytes.exp_avg == StateBytes::BF16.exp_avg);
    let offloaded = can_offload.then(|| match narrow {
        Some((job, keys)) => (Job { offload: 1.0, ..job.clone() }, format!("{keys}, {OFFLOAD}")),
        None => (Job { offload: 1.0, ..job.clone() }, OFFLOAD.to_string()),
    });
    let fitting = |(job, keys): (Job, String)| {
        let found = if fits(&job, bytes) { job } else { first_of(&[job], bytes)?.1 };
        Some((found, keys))
    };
    smaller.iter().cloned().chain(offloaded).find_map(fitting)
}

/// Whether every rank fits into a GPU of `bytes`.
pub fn fits(job: &Job, bytes: u64) -> bool {
    peak(job).is_some_and(|peak| peak <= usable(bytes))
}

/// The bytes that a plan may fill of a GPU of `bytes`.
pub fn usable(bytes: u64) -> u64 {
    (bytes as f64 * FILLED) as u64
}

/// The job with a rung's settings; a single data-parallel rank has nothing to shard.
fn on(job: &Job, rung: Rung) -> Job {
    let mut job = job.clone();
    job.layout.zero = if job.dp_ranks() > 1 { rung.zero } else { 0 };
    job.layout.zero_group = job.layout.zero_group.filter(|_| job.layout.zero > 0);
    job.recompute = rung.recompute;
    job
}

/// Bytes of the fullest rank; `None` where the schedule does not exist.
pub fn peak(job: &Job) -> Option<u64> {
    let job = job.longest_sequences();
    let schedule = job.lists().ok()?;
    memory(&job, &schedule).iter().map(|rank| rank.peak()).max()
}
