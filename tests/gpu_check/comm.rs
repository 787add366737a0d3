//! Time of one collective between CPU ranks: `cargo run --release --example bench_comm [RANKS]`.

use backend_dist::collective::{all_gather, all_reduce, reduce_scatter};
use backend_dist::comm::{Group, ReduceOp};
use backend_dist::launch::launch;
use backend_dist::mesh::{Axis, Mesh, ParallelLayout};
use burn::tensor::{Device, Tensor};
use std::time::Instant;

type Operation = (&'static str, fn(Tensor<2>, &Group) -> Tensor<2>);

fn main() {
    let ranks = std::env::args().nth(1).map_or(2, |text| text.parse().expect("RANKS is a number"));
    let mesh = Mesh::new(ParallelLayout { tp: ranks, ..Default::default() }).expect("one axis is always legal");
    let operations: [Operation; 3] = [
        ("all-reduce", |x, g| all_reduce(x, ReduceOp::Sum, g)),
        ("all-gather", |x, g| all_gather(x, 0, g)),
        ("reduce-scatter", |x, g| reduce_scatter(x, 0, g)),
    ];
    println!("{ranks} ranks, f32, microseconds per operation");
    println!("{:>16} {:>12} {:>12}", "operation", "KiB", "us");
    for (name, operation) in operations {
        for rows in [64, 1024, 16 * 1024, 256 * 1024] {
            let repeat = if rows > 16 * 1024 { 20 } else { 500 };
            let times = launch(&mesh, &[Device::flex()], |rank| {
                let group = rank.group(Axis::Tp);
                let x = Tensor::<2>::ones([rows, 16], &rank.device);
                drop(operation(x.clone(), &group));
                let start = Instant::now();
                for _ in 0..repeat {
                    drop(operation(x.clone(), &group));
                }
                Ok(start.elapsed().as_secs_f64() / f64::from(repeat))
            });
            let worst = times.expect("no rank fails").into_iter().fold(0.0, f64::max);
            println!("{name:>16} {:>12} {:>12.1}", rows * 64 / 1024, worst * 1e6);
        }
    }
}
