//! What an exchange costs: the host to issue it, the GPU to do it, alone and beside matrix products.

use crate::{on_gpus, verdict};
use backend_dist::collective::all_reduce;
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
    let [issue, small, large, products, both] =
        std::array::from_fn(|i| times.iter().map(|times| times[i]).fold(0.0, f64::max));
    let size = times.len().div_ceil(2).max(2) as f64;
    // Bytes per second as nccl-tests count them: 2 (n - 1) / n of the buffer go over every link.
    let bus = 2.0 * (size - 1.0) / size * (1u64 << 30) as f64 / large / 1e9;
    println!("all-reduce over {size} GPUs: {:.1} us of the host to issue, {:.1} us each", issue * 1e6, small * 1e6);
    println!("1 GiB of bf16: {:.2} ms, {bus:.0} GB/s on the bus", large * 1e3);
    println!("8 matrix products: {:.2} ms alone, {:.2} ms beside the 1 GiB", products * 1e3, both * 1e3);
    0
}

fn times(rank: &Rank) -> [f64; 5] {
    let (group, device) = (rank.group(Axis::Tp), &rank.device);
    let small = Tensor::<1>::ones([4096], (device, DType::BF16));
    let large = Tensor::<1>::zeros([1 << 29], (device, DType::BF16));
    let matrix = || Tensor::<2>::random([8192, 8192], Distribution::Normal(0.0, 1.0), (device, DType::BF16));
    let (a, b) = (matrix(), matrix());
    let time = |f: &dyn Fn()| {
        f();
        device.sync().expect("the GPU works");
        group.barrier();
        let start = Instant::now();
        f();
        let issued = start.elapsed().as_secs_f64();
        device.sync().expect("the GPU works");
        (issued, start.elapsed().as_secs_f64())
    };
    let (issue, all) = time(&|| (0..200).for_each(|_| drop(all_reduce(small.clone(), ReduceOp::Sum, &group))));
    let multiply = || (0..8).for_each(|_| drop(matmul(a.clone(), b.clone())));
    let (_, alone) = time(&|| all_reduce_in_place(&large, &group).wait());
    let (_, products) = time(&multiply);
    let (_, both) = time(&|| {
        let pending = all_reduce_in_place(&large, &group);
        multiply();
        pending.wait();
    });
    [issue / 200.0, all / 200.0, alone, products, both]
}
