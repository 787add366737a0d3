//! All-reduces of small tensors by one kernel: results, in CUDA graphs too; a rank that is lost; and times against NCCL.

use crate::{on_gpus_over, verdict};
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

type Check = fn(&Rank) -> Result<(), BoxError>;

/// Number of wrong checks.
pub fn check(gpus: usize) -> usize {
    let checks: [(&str, Check); 3] = [
        ("one-shot all-reduces of all types and sizes", all_sizes),
        ("4,000 one-shot all-reduces with changing data", many),
        ("one-shot all-reduces in a CUDA graph", recorded),
    ];
    let run = |(name, check): (&str, Check)| {
        let outcome = on_gpus_over(gpus, gpus, |rank| {
            let _sums = one_shot_sums(&rank.group(Axis::Tp), &rank.device);
            check(rank)
        });
        verdict(name, outcome.map(drop).map_err(|error| error.to_string()))
    };
    checks.into_iter().map(run).sum()
}

/// Small integers, whose sums are exact in every type.
fn value(rank: usize, round: usize, i: usize) -> usize {
    (i * 7 + rank * 3 + round * 5) % 11
}

fn tensor(rank: &Rank, round: usize, length: usize, dtype: DType) -> Tensor<1> {
    let values: Vec<f64> = (0..length).map(|i| value(rank.rank, round, i) as f64).collect();
    Tensor::from_data(TensorData::new(values, [length]), (&rank.device, dtype))
}

fn expect(found: Tensor<1>, what: &str, expected: impl Fn(usize) -> usize) -> Result<(), BoxError> {
    let wrong = found.into_data().iter::<f64>().enumerate().find(|(i, found)| *found != expected(*i) as f64);
    wrong.map_or(Ok(()), |(i, found)| Err(format!("{what}: element {i} is {found}, not {}", expected(i)).into()))
}

fn all_sizes(rank: &Rank) -> Result<(), BoxError> {
    let group = rank.group(Axis::Tp);
    for dtype in TYPES {
        let limit = (512 << 10) / group.size() / 8 * 8 / dtype.size();
        let sizes = (1..40).chain([511, 1023, 1024, 1025, 4096, 10_000, limit - 1, limit, limit + 1]);
        // Without waits of the host, and each with its neighbours of other sizes.
        let sums: Vec<_> = sizes.map(|n| (n, all_reduce(tensor(rank, n, n, dtype), ReduceOp::Sum, &group))).collect();
        for (n, sum) in sums {
            let expected = |i| (0..group.size()).map(|rank| value(rank, n, i)).sum::<usize>();
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
        expect(x, &format!("{dtype:?}"), |i| all[rank.rank][i])?;
    }
    Ok(())
}

/// Replays with other data. Ranks of one process record nothing: others of it call the driver meanwhile.
fn recorded(rank: &Rank) -> Result<(), BoxError> {
    let group = rank.group(Axis::Tp);
    if group.is_in_one_process() {
        println!("  one process: nothing is recorded");
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
                    if i < short { size * folded_number(size * sum) } else { size * sum }
                };
                expect(sum.clone(), &format!("{dtype:?}, replay {round}"), expected)?;
            }
            if round % 500 == 0 {
                // One that is not recorded in between.
                let sum = all_reduce(tensor(rank, round, 9, dtype), ReduceOp::Sum, &group);
                expect(sum, "outside of the graph", |i| (0..size).map(|rank| value(rank, round, i)).sum())?;
            }
        }
    }
    Ok(())
}

/// The last rank is lost while its peers' kernels wait for it: in one process it panics; in several its process ends
/// without a word, and the peers wait in a CUDA graph. The others end with an error. 1 if not.
pub fn lost_rank(gpus: usize) -> usize {
    lost(gpus, "a one-shot all-reduce", |x, group| all_reduce(x, ReduceOp::Sum, group))
}

/// The same in any sum.
pub fn lost(gpus: usize, what: &str, sum: impl Fn(Tensor<1>, &Group) -> Tensor<1> + Sync) -> usize {
    let start = Instant::now();
    let outcome = on_gpus_over(gpus, gpus, |rank| {
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
        Ok(_) => Err("the run has not failed".into()),
        Err(error) => {
            println!("  {seconds:.1} s: {error}");
            if start.elapsed() > LIMIT { Err(format!("it took {seconds:.0} s")) } else { Ok(()) }
        }
    };
    verdict(&format!("a rank is lost, its peers wait in {what}"), outcome)
}

/// Links of a chain whose time is taken.
pub const CHAIN: usize = 64;

/// Microseconds of a link of the chain: eager, and in a CUDA graph where each rank has a process.
pub fn time<T>(rank: &Rank, input: &Tensor<1, Int>, chain: impl Fn() -> T) -> Result<[f64; 2], BoxError> {
    const REPLAYS: usize = 20;
    let group = rank.group(Axis::Tp);
    let timed = |f: &dyn Fn() -> Result<(), BoxError>| -> Result<f64, BoxError> {
        f()?;
        rank.device.sync().map_err(|error| error.to_string())?;
        group.barrier();
        let start = Instant::now();
        (0..REPLAYS).try_for_each(|_| f())?;
        rank.device.sync().map_err(|error| error.to_string())?;
        Ok(start.elapsed().as_secs_f64() / (REPLAYS * CHAIN) as f64 * 1e6)
    };
    let eager = timed(&|| {
        drop(chain());
        Ok(())
    })?;
    if group.is_in_one_process() {
        return Ok([eager, f64::NAN]);
    }
    let (recording, _results) = Recording::new(input, &chain)?;
    Ok([eager, timed(&|| Ok(recording.replay()?))?])
}

/// Prints microseconds of an all-reduce of each size in a chain of 64, by one kernel and by NCCL; and in a CUDA graph.
pub fn speed(gpus: usize) -> usize {
    let sizes = [1, 4, 8, 16, 32, 64, 128, 256].map(|kib: usize| kib << 10);
    let times = on_gpus_over(gpus, gpus, |rank| {
        let group = rank.group(Axis::Tp);
        let time = |bytes: usize| {
            let input = Tensor::<1, Int>::ones([bytes / 2], (&rank.device, DType::I32));
            time(rank, &input, || {
                let x = input.clone().float().cast(DType::BF16);
                (0..CHAIN).fold(x, |x, _| all_reduce(x, ReduceOp::Sum, &group))
            })
        };
        let nccl = sizes.iter().map(|bytes| time(*bytes)).collect::<Result<Vec<_>, _>>()?;
        let _sums = one_shot_sums(&group, &rank.device);
        let one_shot = sizes.iter().map(|bytes| time(*bytes)).collect::<Result<Vec<_>, _>>()?;
        Ok([nccl, one_shot])
    });
    let times = match times {
        Ok(times) => times,
        Err(error) => return verdict("times of one-shot all-reduces", Err(error.to_string())),
    };
    println!("all-reduce over {gpus} GPUs in bf16, us each: eager, in a CUDA graph (only ranks with a process each)");
    for (at, bytes) in sizes.iter().enumerate() {
        let slowest = |way: usize, of: usize| times.iter().map(|times| times[way][at][of]).fold(0.0, f64::max);
        let [nccl, one_shot] = [0, 1].map(|way| format!("{:.1}, {:.1}", slowest(way, 0), slowest(way, 1)));
        println!("  {:>3} KiB: NCCL {nccl}; one-shot {one_shot}", bytes >> 10);
    }
    0
}
