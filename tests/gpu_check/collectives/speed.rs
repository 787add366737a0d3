//! The cost of collectives: issued by the host, alone on the GPU, and overlapped with GEMMs.

use super::halves;
use crate::clock::on_rank;
use crate::ranks::{on_gpus, slowest};
use crate::report::Report;
use backend_dist::collective::{self, all_reduce};
use backend_dist::comm::ReduceOp;
use backend_dist::launch::Rank;
use backend_dist::mesh::Axis;
use backend_dist::ops::matmul;
use backend_dist::overlap::all_reduce_in_place;
use burn::tensor::{DType, Distribution, Tensor};

/// Prints the slowest rank's times.
pub fn report(gpus: usize, report: &mut Report) {
    let times = on_gpus(&halves(gpus), |rank| Ok(times(rank)));
    let Some(times) = report.attempt("times of an all-reduce", times) else { return };
    let [issue, small, large, gemms, both] = std::array::from_fn(|i| slowest(&times, |times| times[i]));
    let size = times.len().div_ceil(2).max(2) as f64;
    // Bytes per second as nccl-tests count them: 2 (n - 1) / n of the buffer go over every link.
    let bus = 2.0 * (size - 1.0) / size * (1u64 << 30) as f64 / large / 1e9;
    println!("all-reduce over {size} GPUs: {:.1} us of the host to issue, {:.1} us each", issue * 1e6, small * 1e6);
    println!("1 GiB of bf16: {:.2} ms, {bus:.0} GB/s on the bus", large * 1e3);
    println!("8 GEMMs: {:.2} ms alone, {:.2} ms overlapped with the 1 GiB", gemms * 1e3, both * 1e3);
}

fn times(rank: &Rank) -> [f64; 5] {
    let (group, device) = (rank.group(Axis::Tp), &rank.device);
    let small = Tensor::<1>::ones([4096], (device, DType::BF16));
    let large = Tensor::<1>::zeros([1 << 29], (device, DType::BF16));
    let matrix = || Tensor::<2>::random([8192, 8192], Distribution::Normal(0.0, 1.0), (device, DType::BF16));
    let (a, b) = (matrix(), matrix());
    let each = on_rank(rank, &group, 200, || drop(all_reduce(small.clone(), ReduceOp::Sum, &group)));
    let time = |f: &dyn Fn()| on_rank(rank, &group, 1, f).done;
    let multiply = || (0..8).for_each(|_| drop(matmul(a.clone(), b.clone())));
    let alone = time(&|| all_reduce_in_place(&large, &group).wait());
    let both = time(&|| {
        let pending = all_reduce_in_place(&large, &group);
        multiply();
        pending.wait();
    });
    [each.issued, each.done, alone, time(&multiply), both]
}

/// Prints the speed of an all-to-all like that of tokens to experts, 64 MiB from each rank to each other: without a
/// part for the rank itself, and with one, which NCCL's kernel copies too.
pub fn all_to_all(gpus: usize, report: &mut Report) {
    const TOKENS: usize = 8192;
    let run = |rank: &Rank| {
        let group = rank.group(Axis::Tp);
        let seconds = |own: usize| {
            let splits: Vec<usize> =
                (0..group.size()).map(|to| if to == group.rank() { own } else { TOKENS }).collect();
            let x = Tensor::<2>::zeros([splits.iter().sum(), 4096], (&rank.device, DType::BF16));
            on_rank(rank, &group, 4, || drop(collective::all_to_all(x.clone(), &splits, &splits, &group))).done
        };
        Ok((group.size(), [seconds(0), seconds(TOKENS)]))
    };
    let Some(found) = report.attempt("times of an all-to-all", on_gpus(&halves(gpus), run)) else { return };
    let size = found[0].0;
    let sent = (TOKENS * 4096 * 2 * (size - 1)) as f64;
    for (i, what) in ["to other ranks only", "with a part for the rank itself"].into_iter().enumerate() {
        let slowest = slowest(&found, |(_, times)| times[i]);
        println!("all-to-all over {size}, {what}: {:.3} ms, {:.0} GB/s sent", slowest * 1e3, sent / slowest / 1e9);
    }
}
