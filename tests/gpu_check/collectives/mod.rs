//! Checks all collectives over NCCL, with a GPU per rank, against ranks in shared memory; the errors of a run in which
//! a rank misbehaves; and the cost of collectives.
//!
//! `cargo run --release --example collective_check --features cuda -- [GPUS] [PART..]`; an even number of GPUs, at
//! least two. Without a part it runs all of them in this order: `collectives`, `asynchronous`, `overlap` (linear
//! layers), `failures`, `mismatches` (ranks that issue different collectives), `repeat` (the collectives once more: what
//! a failed run leaves behind must not disturb the next one), `context` (attention over a context-parallel group), `fp8`
//! (scales of layers there), `one-shot` (all-reduces of small tensors by one kernel, over all GPUs), `one-shot-lost-rank`
//! (one of them is lost), `normed-sums` (the same kernel with the residual addition and the norm behind it) and
//! `normed-sums-lost-rank`, and the costs: `speed`, `one-shot-speed`, `normed-sums-speed`, `all-to-all-speed` (tokens to
//! experts), `overlap-speed`, `context-speed`. The values are small integers, so every sum is exact in every type and results must be equal; those
//! of linear layers are random, and results equal up to rounding.
//!
//! All parts but `failures`, `context` and `fp8` also run in several processes of one host, with the variables that
//! torchrun sets; each process checks and reports its own ranks. Those with a lost rank end the last process there.

mod asynchronous;
mod context;
mod failures;
mod fp8;
mod normed_sums;
mod one_shot;
mod overlap;
mod results;
mod speed;

use backend_dist::comm::RunError;
use backend_dist::gpu;
use backend_dist::launch::{BoxError, Rank};
use backend_dist::mesh::{Mesh, ParallelLayout};
use backend_dist::process::Processes;
use burn::tensor::Device;
use std::time::Instant;

/// Returns the number of wrong results for this many GPUs.
type Check = fn(usize) -> usize;

const CHECKS: [(&str, Check); 18] = [
    ("collectives", results::check),
    ("asynchronous", asynchronous::check),
    ("overlap", overlap::check),
    ("failures", failures::check),
    ("mismatches", failures::mismatches),
    ("repeat", results::check),
    ("context", context::check),
    ("fp8", fp8::check),
    ("one-shot", one_shot::check),
    ("one-shot-lost-rank", one_shot::lost_rank),
    ("normed-sums", normed_sums::check),
    ("normed-sums-lost-rank", normed_sums::lost_rank),
    ("speed", speed::report),
    ("one-shot-speed", one_shot::speed),
    ("normed-sums-speed", normed_sums::speed),
    ("all-to-all-speed", speed::all_to_all_speed),
    ("overlap-speed", overlap::report),
    ("context-speed", context::report),
];

fn main() {
    let gpus: usize = std::env::args().nth(1).map_or(2, |text| text.parse().expect("GPUS is a number"));
    assert!(gpus >= 2 && gpus.is_multiple_of(2), "two GPUs or more, an even number");
    let wanted: Vec<String> = std::env::args().skip(2).collect();
    let unknown = wanted.iter().find(|word| CHECKS.iter().all(|(name, _)| name != word));
    assert!(unknown.is_none(), "{unknown:?} is not a check: {:?}", CHECKS.map(|(name, _)| name));
    if let Err(missing) = gpu::require(gpus) {
        eprintln!("{missing}");
        std::process::exit(2);
    }
    let mut bad = 0;
    for (name, part) in
        CHECKS.into_iter().filter(|(name, _)| wanted.is_empty() || wanted.iter().any(|word| word == name))
    {
        let start = Instant::now();
        bad += part(gpus);
        println!("-- {name}: {:.1} s", start.elapsed().as_secs_f64());
    }
    if bad > 0 {
        println!("{bad} checks failed");
        std::process::exit(1);
    }
    println!("all collectives are right");
}

/// Runs `f` on `gpus` ranks, each with a GPU of its own; four and more form two groups of tensor parallelism. The
/// results of the ranks of this process.
fn on_gpus<T: Send>(gpus: usize, f: impl Fn(&Rank) -> Result<T, BoxError> + Sync) -> Result<Vec<T>, RunError> {
    on_gpus_over(gpus, half(gpus), f)
}

/// The same with groups of `tp`.
fn on_gpus_over<T: Send>(
    gpus: usize,
    tp: usize,
    f: impl Fn(&Rank) -> Result<T, BoxError> + Sync,
) -> Result<Vec<T>, RunError> {
    let processes = Processes::from_env(&mesh(gpus, tp), &[]).expect("the processes find each other");
    let devices: Vec<Device> = processes.local_devices().map(Device::cuda).collect();
    processes.launch(&devices, |rank| f(&rank))
}

/// Half of the ranks, but at least two.
fn half(ranks: usize) -> usize {
    (ranks / 2).max(2)
}

fn mesh(ranks: usize, tp: usize) -> Mesh {
    Mesh::new(ParallelLayout { tp, dp: ranks / tp, ..Default::default() }).expect("two axes are always legal")
}

/// Prints what was checked and returns 1 if it was wrong.
fn verdict(name: &str, outcome: Result<(), String>) -> usize {
    match outcome {
        Ok(()) => println!("{name:<44} ok"),
        Err(ref why) => println!("{name:<44} BAD: {why}"),
    }
    outcome.is_err() as usize
}
