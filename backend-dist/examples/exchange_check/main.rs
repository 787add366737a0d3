//! Checks everything ranks exchange over NCCL against ranks in shared memory, with a GPU per rank; then what a run says
//! when a rank misbehaves; then what an exchange costs.
//!
//! `cargo run --release --example exchange_check --features cuda -- [GPUS] [PART..]`; two GPUs or more, an even number;
//! without a part all of them in this order: `exchanges`, `overlapped`, `beside`, `failures`, `again` (the exchanges
//! once more: what a failed run has left behind must not disturb the next one), `context` (attention over a context
//! parallel group), `fp8` (scales of layers there), and what exchanges cost: `speed`, `rows-speed` (rows that change
//! owner), `beside-speed`, `context-speed`. The values exchanged are small integers, so every sum is exact in every
//! type and results must be equal; those of linear layers are random, and results equal up to rounding.

mod beside;
mod context;
mod failures;
mod fp8;
mod overlapped;
mod results;
mod speed;

use backend_dist::comm::RunError;
use backend_dist::gpu;
use backend_dist::launch::{BoxError, Rank, launch};
use backend_dist::mesh::{Mesh, ParallelLayout};
use burn::tensor::Device;
use std::time::Instant;

/// Gives the number of wrong results for this many GPUs.
type Part = fn(usize) -> usize;

const PARTS: [(&str, Part); 11] = [
    ("exchanges", results::check),
    ("overlapped", overlapped::check),
    ("beside", beside::check),
    ("failures", failures::check),
    ("again", results::check),
    ("context", context::check),
    ("fp8", fp8::check),
    ("speed", speed::report),
    ("rows-speed", speed::rows),
    ("beside-speed", beside::report),
    ("context-speed", context::report),
];

fn main() {
    let gpus: usize = std::env::args().nth(1).map_or(2, |text| text.parse().expect("GPUS is a number"));
    assert!(gpus >= 2 && gpus.is_multiple_of(2), "two GPUs or more, an even number");
    let wanted: Vec<String> = std::env::args().skip(2).collect();
    let unknown = wanted.iter().find(|word| PARTS.iter().all(|(name, _)| name != word));
    assert!(unknown.is_none(), "{unknown:?} is not a part: {:?}", PARTS.map(|(name, _)| name));
    if let Err(missing) = gpu::require(gpus) {
        eprintln!("{missing}");
        std::process::exit(2);
    }
    let mut bad = 0;
    for (name, part) in
        PARTS.into_iter().filter(|(name, _)| wanted.is_empty() || wanted.iter().any(|word| word == name))
    {
        let start = Instant::now();
        bad += part(gpus);
        println!("-- {name}: {:.1} s", start.elapsed().as_secs_f64());
    }
    if bad > 0 {
        println!("{bad} checks failed");
        std::process::exit(1);
    }
    println!("all exchanges are right");
}

/// Runs `f` on `gpus` ranks, each with a GPU of its own; four and more form two groups of tensor parallelism.
fn on_gpus<T: Send>(gpus: usize, f: impl Fn(&Rank) -> Result<T, BoxError> + Sync) -> Result<Vec<T>, RunError> {
    on_gpus_over(gpus, half(gpus), f)
}

/// The same with groups of `tp`.
fn on_gpus_over<T: Send>(
    gpus: usize,
    tp: usize,
    f: impl Fn(&Rank) -> Result<T, BoxError> + Sync,
) -> Result<Vec<T>, RunError> {
    let devices: Vec<Device> = (0..gpus).map(Device::cuda).collect();
    launch(&mesh(gpus, tp), &devices, |rank| f(&rank))
}

/// Half of the ranks, at least two.
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
