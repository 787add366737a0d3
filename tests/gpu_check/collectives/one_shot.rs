//! All-reduces of small tensors by one kernel: results, in CUDA graphs too; a rank that is lost; and times against NCCL.

use super::{each, expect};
use crate::clock::on_rank;
use crate::ranks::{on_gpus, slowest, tensor_parallel};
use crate::report::Report;
use backend_dist::collective::{all_reduce, one_shot_sums};
use backend_dist::comm::{Group, ReduceOp};
use backend_dist::gpu::{Recording, overwrite};
use backend_dist::launch::{BoxError, Rank};
use backend_dist::mesh::Axis;
use burn::tensor::{DType, Int, Tensor, TensorData};
use std::time::{Duration, Instant};

const TYPES: [DType; 4] = [DType::BF16, DType::F16, DType::F32, DType::F64];

/// How long a run with a lost rank may take to end.
const LIMIT: Duration = Duration::from_secs(20);

pub fn check(gpus: usize, report: &mut Report) {
    each(
        &tensor_parallel(gpus),
        report,
        &[
            ("one-shot all-reduces of all types and sizes", all_sizes),
            ("4,000 one-shot all-reduces with changing data", many),
            ("one-shot all-reduces in a CUDA graph", recorded),
        ],
    );
}

/// Small integers, whose sums are exact in every type.
fn value(rank: usize, round: usize, i: usize) -> usize {
    (i * 7 + rank * 3 + round * 5) % 11
}

fn tensor(rank: &Rank, round: usize, length: usize, dtype: DType) -> Tensor<1> {
    let values: Vec<f64> = (0..length).map(|i| value(rank.rank, round, i) as f64).collect();
    Tensor::from_data(TensorData::new(values, [length]), (&rank.device, dtype))
}

fn all_sizes(rank: &Rank) -> Result<(), BoxError> {
    let group = rank.group(Axis::Tp);
    let _sums = one_shot_sums(&group, &rank.device);
    for dtype in TYPES {
        let limit = (512 << 10) / group.size() / 8 * 8 / dtype.size();
        let sizes = (1..40).chain([511, 1023, 1024, 1025, 4096, 10_000, limit - 1, limit, limit + 1]);
        // Without waits of the host, and each with its neighbours of other sizes.
        let sums: Vec<_> = sizes.map(|n| (n, all_reduce(tensor(rank, n, n, dtype), ReduceOp::Sum, &group))).collect();
        for (n, sum) in sums {
            let expected = |i| (0..group.size()).map(|rank| value(rank, n, i)).sum::<usize>() as f64;
            expect(sum, &format!("{n} of {dtype:?}"), expected)?;
        }
    }
    Ok(())
}

/// From a sum of at most 128 a number of at most 8, exactly in every type.
fn folded(sum: Tensor<1>) -> Tensor<1> {
    FOLDS.into_iter().fold(sum, |x, at| (x - at as f64).abs())
}

const FOLDS: [usize; 4] = [64, 32, 16, 8];

fn folded_number(sum: usize) -> usize {
    FOLDS.into_iter().fold(sum, usize::abs_diff)
}

/// Each sum is the summand of the next one, so that one that is too early or too late changes all that follow.
fn many(rank: &Rank) -> Result<(), BoxError> {
    let group = rank.group(Axis::Tp);
    let _sums = one_shot_sums(&group, &rank.device);
    for dtype in TYPES {
        let length = 4096 + 3;
        let mut x = tensor(rank, 0, length, dtype);
        let mut all: Vec<Vec<usize>> =
            (0..group.size()).map(|rank| (0..length).map(|i| value(rank, 0, i)).collect()).collect();
        for round in 0..1000 {
            // Now and then a short one, which leaves old words where long ones wait.
            let used = if round % 3 == 1 { 5 } else { length };
            let sum = all_reduce(x.clone().slice([0..used]), ReduceOp::Sum, &group);
            x = x.slice_assign([0..used], folded(sum) + (rank.rank % 4) as f64);
            for i in 0..used {
                let sum = folded_number(all.iter().map(|of| of[i]).sum());
                all.iter_mut().enumerate().for_each(|(rank, of)| of[i] = sum + rank % 4);
            }
        }
        expect(x, &format!("{dtype:?}"), |i| all[rank.rank][i] as f64)?;
    }
    Ok(())
}

/// Whether a group's ranks record CUDA graphs. Ranks of one process do not: others of it call the driver meanwhile.
pub fn records(group: &Group) -> bool {
    if group.is_in_one_process() {
        println!("  one process: nothing is recorded");
    }
    !group.is_in_one_process()
}

/// Replays with other data.
fn recorded(rank: &Rank) -> Result<(), BoxError> {
    let group = rank.group(Axis::Tp);
    let _sums = one_shot_sums(&group, &rank.device);
    if !records(&group) {
        return Ok(());
    }
    let (length, short, size) = (4096, 7, group.size());
    for dtype in TYPES {
        let input = Tensor::<1, Int>::zeros([length], (&rank.device, DType::I32));
        let run = || {
            let own = input.clone().float().cast(dtype) + (rank.rank % 4) as f64;
            // Three, so that replays begin with either half of the memory.
            let sum = folded(all_reduce(own, ReduceOp::Sum, &group));
            let part = folded(all_reduce(sum.clone().slice([0..short]), ReduceOp::Sum, &group));
            all_reduce(sum.slice_assign([0..short], part), ReduceOp::Sum, &group)
        };
        let (recording, sum) = Recording::new(&input, run)?;
        for round in 0..2000 {
            let values: Vec<i32> = (0..length).map(|i| value(0, round, i) as i32).collect();
            overwrite(&input, &values);
            recording.replay()?;
            if round % 100 < 2 {
                let expected = |i: usize| {
                    let sum = folded_number((0..size).map(|rank| value(0, round, i) + rank % 4).sum());
                    (if i < short { size * folded_number(size * sum) } else { size * sum }) as f64
                };
                expect(sum.clone(), &format!("{dtype:?}, replay {round}"), expected)?;
            }
            if round % 500 == 0 {
                // One that is not recorded in between.
                let sum = all_reduce(tensor(rank, round, 9, dtype), ReduceOp::Sum, &group);
                let expected = |i| (0..size).map(|rank| value(rank, round, i)).sum::<usize>() as f64;
                expect(sum, "outside of the graph", expected)?;
            }
        }
    }
    Ok(())
}

/// The last rank is lost while its peers' kernels wait for it: in one process it panics; in several its process ends
/// without a word, and the peers wait in a CUDA graph. The others must end with an error.
pub fn lost_rank(gpus: usize, report: &mut Report) {
    lost(gpus, report, "a one-shot all-reduce", |x, group| all_reduce(x, ReduceOp::Sum, group))
}

/// The same in any sum.
pub fn lost(gpus: usize, report: &mut Report, what: &str, sum: impl Fn(Tensor<1>, &Group) -> Tensor<1> + Sync) {
    let start = Instant::now();
    let outcome = on_gpus(&tensor_parallel(gpus), |rank| {
        let group = rank.group(Axis::Tp);
        let _sums = one_shot_sums(&group, &rank.device);
        let input = Tensor::<1, Int>::ones([4096], (&rank.device, DType::I32));
        let sum = || sum(input.clone().float().cast(DType::BF16), &group);
        let recorded = match group.is_in_one_process() {
            true => None,
            false => Some(Recording::new(&input, sum)?),
        };
        sum().into_data();
        if rank.rank + 1 == gpus {
            match recorded {
                Some(_) => std::process::exit(0),
                None => return Err("the last rank gives up".into()),
            }
        }
        match recorded {
            Some((recording, sum)) => {
                (0..3).try_for_each(|_| recording.replay())?;
                sum.into_data();
            }
            None => drop(sum().into_data()),
        }
        Ok(())
    });
    let seconds = start.elapsed().as_secs_f64();
    let outcome = match outcome {
        Ok(_) => Err("the run has not failed".to_owned()),
        Err(error) => {
            println!("  {seconds:.1} s: {error}");
            if start.elapsed() > LIMIT { Err(format!("it took {seconds:.0} s")) } else { Ok(()) }
        }
    };
    report.outcome(format!("a rank is lost, its peers wait in {what}"), outcome);
}

/// Links of a chain whose time is taken.
pub const CHAIN: usize = 64;

/// Seconds of a link of the chain: eager, and in a CUDA graph where each rank has a process.
pub fn time<T>(rank: &Rank, input: &Tensor<1, Int>, chain: impl Fn() -> T) -> Result<[f64; 2], BoxError> {
    let group = rank.group(Axis::Tp);
    let time = |f: &dyn Fn()| on_rank(rank, &group, 4, f).done / CHAIN as f64;
    let eager = time(&|| drop(chain()));
    if group.is_in_one_process() {
        return Ok([eager, f64::NAN]);
    }
    let (recording, _results) = Recording::new(input, &chain)?;
    Ok([eager, time(&|| recording.replay().expect("a recording can be replayed"))])
}

/// Prints the times of each rank's cases by two methods, as [`time`] says them, in microseconds.
pub fn print(times: &[Vec<[[f64; 2]; 2]>], cases: impl Iterator<Item = String>, methods: [&str; 2]) {
    for (at, case) in cases.enumerate() {
        let us = |method: usize, of: usize| slowest(times, |times| times[at][method][of]) * 1e6;
        let [a, b] = [0, 1].map(|method| format!("{} {:.1}, {:.1}", methods[method], us(method, 0), us(method, 1)));
        println!("  {case}: {a}; {b}");
    }
}

/// Prints microseconds of an all-reduce of each size in a chain of 64, by one kernel and by NCCL; and in a CUDA graph.
pub fn speed(gpus: usize, report: &mut Report) {
    let sizes = [1, 4, 8, 16, 32, 64, 128, 256].map(|kib: usize| kib << 10);
    let times = on_gpus(&tensor_parallel(gpus), |rank| {
        let group = rank.group(Axis::Tp);
        let time = |bytes: &usize| {
            let input = Tensor::<1, Int>::ones([bytes / 2], (&rank.device, DType::I32));
            time(rank, &input, || {
                let x = input.clone().float().cast(DType::BF16);
                (0..CHAIN).fold(x, |x, _| all_reduce(x, ReduceOp::Sum, &group))
            })
        };
        let nccl = sizes.iter().map(time).collect::<Result<Vec<_>, _>>()?;
        let _sums = one_shot_sums(&group, &rank.device);
        let one_shot = sizes.iter().map(time).collect::<Result<Vec<_>, _>>()?;
        Ok(nccl.into_iter().zip(one_shot).map(|(nccl, one_shot)| [nccl, one_shot]).collect::<Vec<_>>())
    });
    let Some(times) = report.attempt("times of one-shot all-reduces", times) else { return };
    println!("all-reduce over {gpus} GPUs in bf16, us each: eager, in a CUDA graph (only ranks with a process each)");
    print(&times, sizes.iter().map(|bytes| format!("{:>3} KiB", bytes >> 10)), ["NCCL", "one-shot"]);
}
