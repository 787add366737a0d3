//! Errors of a run, and how fast they appear, when a rank on a GPU misbehaves.

use crate::results::{ramp, values};
use crate::{on_gpus, verdict};
use backend_dist::collective::{all_reduce, all_to_all, connect, recv};
use backend_dist::comm::{FailureCause, ReduceOp, RunError};
use backend_dist::launch::{BoxError, Rank};
use backend_dist::mesh::Axis;
use burn::tensor::DType;
use std::time::{Duration, Instant};

/// How long a run may take to end.
const LIMIT: Duration = Duration::from_secs(20);

struct Case {
    name: &'static str,
    run: fn(&Rank) -> Result<(), BoxError>,
    is_right: fn(&RunError) -> bool,
}

/// Number of wrong checks.
pub fn check(gpus: usize) -> usize {
    let cases = [
        Case {
            name: "a rank panics, its peers wait on their GPUs",
            run: |rank| {
                sum(rank, 8);
                assert!(rank.rank != 0, "the first rank gives up");
                sum(rank, 8);
                Ok(())
            },
            is_right: |error| error.rank == 0 && matches!(error.cause, FailureCause::Panic(_)),
        },
        Case {
            name: "a rank panics, its peers wait for its part of an all-to-all",
            run: |rank| {
                swap(rank);
                assert!(rank.rank != 0, "the first rank gives up");
                swap(rank);
                Ok(())
            },
            is_right: |error| error.rank == 0 && matches!(error.cause, FailureCause::Panic(_)),
        },
        Case {
            name: "a rank fails before its peers connect",
            run: |rank| match rank.rank {
                0 => Err("no such file".into()),
                _ => {
                    sum(rank, 8);
                    Ok(())
                }
            },
            is_right: |error| error.rank == 0 && error.cause == FailureCause::Error("no such file".into()),
        },
        Case {
            name: "a rank finishes early",
            run: |rank| {
                sum(rank, 8);
                if rank.rank != 0 {
                    sum(rank, 8);
                }
                Ok(())
            },
            is_right: |error| error.rank == 0 && matches!(error.cause, FailureCause::Missing { .. }),
        },
        Case {
            name: "a message is never sent",
            run: |rank| {
                let group = rank.group(Axis::Tp);
                connect(&group, &rank.device);
                if group.rank() == 1 {
                    values(recv([4], DType::F32, &rank.device, 0, &group));
                }
                Ok(())
            },
            is_right: |error| matches!(error.cause, FailureCause::Missing { .. }),
        },
    ];
    cases.into_iter().map(|case| verdict(case.name, outcome(gpus, &case))).sum()
}

/// The same for ranks that issue different operations, which those of several processes notice too.
pub fn mismatches(gpus: usize) -> usize {
    let cases = [
        Case {
            name: "ranks bring different shapes",
            run: |rank| {
                sum(rank, 8);
                sum(rank, if rank.rank == 0 { 16 } else { 8 });
                Ok(())
            },
            is_right: |error| matches!(error.cause, FailureCause::Mismatch { .. }),
        },
        Case {
            name: "one rank leaves out an operation",
            run: |rank| {
                sum(rank, 8);
                if rank.rank != 0 {
                    sum(rank, 8);
                }
                swap(rank);
                Ok(())
            },
            is_right: |error| matches!(error.cause, FailureCause::Mismatch { .. }),
        },
    ];
    cases.into_iter().map(|case| verdict(case.name, outcome(gpus, &case))).sum()
}

/// The host waits for the GPU here, and the GPU for its peers.
fn sum(rank: &Rank, length: usize) {
    values(all_reduce(ramp([length], rank, DType::F32), ReduceOp::Sum, &rank.group(Axis::Tp)));
}

/// The same where DMA copy engines send the tokens: the thread that launches the GPU's work waits for the peers'
/// threads too.
fn swap(rank: &Rank) {
    let group = rank.group(Axis::Tp);
    let splits = vec![8; group.size()];
    values(all_to_all(ramp([8 * group.size(), 4], rank, DType::F32), &splits, &splits, &group));
}

fn outcome(gpus: usize, case: &Case) -> Result<(), String> {
    let start = Instant::now();
    let Err(error) = on_gpus(gpus, case.run) else { return Err("the run has not failed".into()) };
    println!("  {:.1} s: {error}", start.elapsed().as_secs_f64());
    if start.elapsed() > LIMIT {
        return Err(format!("it took {:.0} s", start.elapsed().as_secs_f64()));
    }
    if (case.is_right)(&error) { Ok(()) } else { Err("not the expected failure".into()) }
}
