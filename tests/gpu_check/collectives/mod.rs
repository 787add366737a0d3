//! All collectives over NCCL, with a GPU per rank, against ranks in shared memory; the errors of a run in which a rank
//! misbehaves; and the cost of collectives.
//!
//! An even number of GPUs, at least two. The values are small integers, so every sum is exact in every type and results
//! must be equal; those of linear layers are random, and results equal up to rounding.
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

use crate::choice::Choice;
use crate::ranks::on_gpus;
use crate::report::Report;
use backend_dist::launch::{BoxError, Rank};
use backend_dist::mesh::ParallelLayout;
use burn::tensor::Tensor;

type Part = fn(usize, &mut Report);

/// Each part for a number of GPUs, in this order.
const PARTS: [(&str, Part); 18] = [
    ("collectives", results::check),
    ("asynchronous", asynchronous::check),
    // Linear layers.
    ("overlap", overlap::check),
    ("failures", failures::check),
    // Ranks that issue different collectives.
    ("mismatches", failures::mismatches),
    // What a failed run leaves behind must not disturb the next one.
    ("repeat", results::check),
    // Attention over a context-parallel group.
    ("context", context::check),
    // Scales of layers there.
    ("fp8", fp8::check),
    // All-reduces of small tensors by one kernel, over all GPUs.
    ("one-shot", one_shot::check),
    ("one-shot-lost-rank", one_shot::lost_rank),
    // The same kernel with the residual addition and the norm behind it.
    ("normed-sums", normed_sums::check),
    ("normed-sums-lost-rank", normed_sums::lost_rank),
    ("speed", speed::report),
    ("one-shot-speed", one_shot::speed),
    ("normed-sums-speed", normed_sums::speed),
    // Tokens to experts.
    ("all-to-all-speed", speed::all_to_all),
    ("overlap-speed", overlap::speed),
    ("context-speed", context::speed),
];

pub const NAMES: [&str; PARTS.len()] = {
    let (mut names, mut i) = ([""; PARTS.len()], 0);
    while i < PARTS.len() {
        names[i] = PARTS[i].0;
        i += 1;
    }
    names
};

pub fn run(choice: &Choice, report: &mut Report) -> Result<(), BoxError> {
    let gpus = choice.numbers[0];
    if gpus < 2 || gpus % 2 == 1 {
        return Err(format!("{gpus} GPUs: it takes two or more, an even number").into());
    }
    for (name, part) in PARTS.into_iter().filter(|(name, _)| choice.does(name)) {
        let start = report.seconds();
        part(gpus, report);
        println!("-- {name}: {:.1} s", report.seconds() - start);
    }
    Ok(())
}

/// Half of the ranks, but at least two, in tensor parallel: four and more form two groups.
fn halves(ranks: usize) -> ParallelLayout {
    let tp = (ranks / 2).max(2);
    ParallelLayout { tp, dp: ranks / tp, ..Default::default() }
}

type RankCheck = fn(&Rank) -> Result<(), BoxError>;

/// Runs checks that each rank makes by itself.
fn each(layout: &ParallelLayout, report: &mut Report, checks: &[(&str, RankCheck)]) {
    for (name, check) in checks {
        report.outcome(name, on_gpus(layout, check));
    }
}

/// An error if an element is another number.
fn expect(found: Tensor<1>, what: &str, expected: impl Fn(usize) -> f64) -> Result<(), BoxError> {
    let wrong = found.into_data().iter::<f64>().enumerate().find(|(i, found)| *found != expected(*i));
    wrong.map_or(Ok(()), |(i, found)| Err(format!("{what}: element {i} is {found}, not {}", expected(i)).into()))
}
