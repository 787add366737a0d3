//! The cost of collectives: issued by the host, alone on the GPU, and overlapped with GEMMs.

use crate::{on_gpus, verdict};
use backend_dist::collective::{all_reduce, all_to_all};
use backend_dist::comm::ReduceOp;
use backend_dist::launch::Rank;
use backend_dist::mesh::Axis;
use backend_dist::ops::matmul;
use backend_dist::overlap::all_reduce_in_place;
use burn::tensor::{DType, Distribution, Tensor};
use std::time::Instant;

/// Prints the slowest rank's times; 1 if a rank fails.
pub fn report(gpus: usize) -> usize {
    let times = match on_gpus(gpus, |rank| Ok(times(rank))) {
        Ok(times) => times,
        Err(error) => return verdict("times of an all-reduce", Err(error.to_string())),
    };
    let [issue, small, large, gemms, both] =
        std::array::from_fn(|i| times.iter().map(|times| times[i]).fold(0.0, f64::max));
    let size = times.len().div_ceil(2).max(2) as f64;
    // Bytes per second as nccl-tests count them: 2 (n - 1) / n of the buffer go over every link.
    let bus = 2.0 * (size - 1.0) / size * (1u64 << 30) as f64 / large / 1e9;
    println!("all-reduce over {size} GPUs: {:.1} us of the host to issue, {:.1} us each", issue * 1e6, small * 1e6);
    println!("1 GiB of bf16: {:.2} ms, {bus:.0} GB/s on the bus", large * 1e3);
    println!("8 GEMMs: {:.2} ms alone, {:.2} ms overlapped with the 1 GiB", gemms * 1e3, both * 1e3);
    0
}

fn times(rank: &Rank) -> [f64; 5] {
    let (group, device) = (rank.group(Axis::Tp), &rank.device);
    let small = Tensor::<1>::ones([4096], (device, DType::BF16));
    let large = Tensor::<1>::zeros([1 << 29], (device, DType::BF16));
    let matrix = || Tensor::<2>::random([8192, 8192], Distribution::Normal(0.0, 1.0), (device, DType::BF16));
    let (a, b) = (matrix(), matrix());
    let time = |f: &dyn Fn()| time(rank, f);
    let (issue, all) = time(&|| (0..200).for_each(|_| drop(all_reduce(small.clone(), ReduceOp::Sum, &group))));
    let multiply = || (0..8).for_each(|_| drop(matmul(a.clone(), b.clone())));
    let (_, alone) = time(&|| all_reduce_in_place(&large, &group).wait());
    let (_, gemms) = time(&multiply);
    let (_, both) = time(&|| {
        let pending = all_reduce_in_place(&large, &group);
        multiply();
        pending.wait();
    });
    [issue / 200.0, all / 200.0, alone, gemms, both]
}

/// Prints the speed of an all-to-all like that of tokens to experts, 64 MiB from each rank to each other: without a
/// part for the rank itself, and with one, which NCCL's kernel copies too. 1 if a rank fails.
pub fn all_to_all_speed(gpus: usize) -> usize {
    const TOKENS: usize = 8192;
    const TIMES: usize = 20;
    let run = |rank: &Rank| {
        let group = rank.group(Axis::Tp);
        let seconds = |own: usize| {
            let splits: Vec<usize> =
                (0..group.size()).map(|to| if to == group.rank() { own } else { TOKENS }).collect();
            let x = Tensor::<2>::zeros([splits.iter().sum(), 4096], (&rank.device, DType::BF16));
            let collective = || (0..TIMES).for_each(|_| drop(all_to_all(x.clone(), &splits, &splits, &group)));
            time(rank, &collective).1 / TIMES as f64
        };
        Ok((group.size(), [seconds(0), seconds(TOKENS)]))
    };
    let found = match on_gpus(gpus, run) {
        Ok(found) => found,
        Err(error) => return verdict("times of an all-to-all", Err(error.to_string())),
    };
    let size = found[0].0;
    let sent = (TOKENS * 4096 * 2 * (size - 1)) as f64;
    for (i, what) in ["to other ranks only", "with a part for the rank itself"].into_iter().enumerate() {
        let slowest = found.iter().map(|(_, times)| times[i]).fold(0.0, f64::max);
        println!("all-to-all over {size}, {what}: {:.3} ms, {:.0} GB/s sent", slowest * 1e3, sent / slowest / 1e9);
    }
    0
}

/// Seconds until the host has issued `f`, and until the GPU has finished it, in a second run.
fn time(rank: &Rank, f: &dyn Fn()) -> (f64, f64) {
    f();
    rank.device.sync().expect("the GPU works");
    rank.group(Axis::Tp).barrier();
    let start = Instant::now();
    f();
    let issued = start.elapsed().as_secs_f64();
    rank.device.sync().expect("the GPU works");
    (issued, start.elapsed().as_secs_f64())
}
