//! Errors of a run, and how fast they appear, when a rank on a GPU misbehaves.

use super::halves;
use super::results::ramp;
use crate::numbers::host;
use crate::ranks::on_gpus;
use crate::report::Report;
use backend_dist::collective::{all_reduce, all_to_all, connect, recv};
use backend_dist::comm::{FailureCause, ReduceOp, RunError};
use backend_dist::launch::{BoxError, Rank};
use backend_dist::mesh::Axis;
use burn::tensor::DType;
use std::time::{Duration, Instant};

/// How long a run may take to end.
const LIMIT: Duration = Duration::from_secs(20);

type Run = fn(&Rank) -> Result<(), BoxError>;
type IsRight = fn(&RunError) -> bool;

pub fn check(gpus: usize, report: &mut Report) {
    let mut case = |name: &str, run: Run, is_right: IsRight| report.outcome(name, outcome(gpus, run, is_right));
    let panicked: IsRight = |error| error.rank == 0 && matches!(error.cause, FailureCause::Panic(_));
    let sum_twice: Run = |rank| {
        sum(rank, 8);
        assert!(rank.rank != 0, "the first rank gives up");
        sum(rank, 8);
        Ok(())
    };
    case("a rank panics, its peers wait on their GPUs", sum_twice, panicked);
    let swap_twice: Run = |rank| {
        swap(rank);
        assert!(rank.rank != 0, "the first rank gives up");
        swap(rank);
        Ok(())
    };
    case("a rank panics, its peers wait for its part of an all-to-all", swap_twice, panicked);
    let no_file: Run = |rank| match rank.rank {
        0 => Err("no such file".into()),
        _ => {
            sum(rank, 8);
            Ok(())
        }
    };
    case("a rank fails before its peers connect", no_file, |error| {
        error.rank == 0 && error.cause == FailureCause::Error("no such file".into())
    });
    let early: Run = |rank| {
        sum(rank, 8);
        if rank.rank != 0 {
            sum(rank, 8);
        }
        Ok(())
    };
    case("a rank finishes early", early, |error| {
        error.rank == 0 && matches!(error.cause, FailureCause::Missing { .. })
    });
    let never_sent: Run = |rank| {
        let group = rank.group(Axis::Tp);
        connect(&group, &rank.device);
        if group.rank() == 1 {
            host(recv([4], DType::F32, &rank.device, 0, &group));
        }
        Ok(())
    };
    case("a message is never sent", never_sent, |error| matches!(error.cause, FailureCause::Missing { .. }));
}

/// The same for ranks that issue different operations, which those of several processes notice too.
pub fn mismatches(gpus: usize, report: &mut Report) {
    let is_mismatch: IsRight = |error| matches!(error.cause, FailureCause::Mismatch { .. });
    let shapes: Run = |rank| {
        sum(rank, 8);
        sum(rank, if rank.rank == 0 { 16 } else { 8 });
        Ok(())
    };
    report.outcome("ranks bring different shapes", outcome(gpus, shapes, is_mismatch));
    let left_out: Run = |rank| {
        sum(rank, 8);
        if rank.rank != 0 {
            sum(rank, 8);
        }
        swap(rank);
        Ok(())
    };
    report.outcome("one rank leaves out an operation", outcome(gpus, left_out, is_mismatch));
}

/// The host waits for the GPU here, and the GPU for its peers.
fn sum(rank: &Rank, length: usize) {
    host(all_reduce(ramp([length], rank, DType::F32), ReduceOp::Sum, &rank.group(Axis::Tp)));
}

/// The same where DMA copy engines send the tokens: the thread that launches the GPU's work waits for the peers'
/// threads too.
fn swap(rank: &Rank) {
    let group = rank.group(Axis::Tp);
    let splits = vec![8; group.size()];
    host(all_to_all(ramp([8 * group.size(), 4], rank, DType::F32), &splits, &splits, &group));
}

fn outcome(gpus: usize, run: Run, is_right: IsRight) -> Result<(), String> {
    let start = Instant::now();
    let Err(error) = on_gpus(&halves(gpus), run) else { return Err("the run has not failed".into()) };
    println!("  {:.1} s: {error}", start.elapsed().as_secs_f64());
    if start.elapsed() > LIMIT {
        return Err(format!("it took {:.0} s", start.elapsed().as_secs_f64()));
    }
    if is_right(&error) { Ok(()) } else { Err("not the expected failure".into()) }
}
