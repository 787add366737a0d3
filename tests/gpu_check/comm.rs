//! Time of one collective between CPU ranks.

use crate::choice::Choice;
use crate::clock::batch;
use crate::ranks::{mesh, slowest, tensor_parallel};
use crate::report::Report;
use backend_dist::collective::{all_gather, all_reduce, reduce_scatter};
use backend_dist::comm::{Group, ReduceOp};
use backend_dist::launch::{BoxError, launch};
use backend_dist::mesh::Axis;
use burn::tensor::{Device, Tensor};

type Operation = (&'static str, fn(Tensor<2>, &Group) -> Tensor<2>);

pub fn run(choice: &Choice, _: &mut Report) -> Result<(), BoxError> {
    let ranks = choice.numbers[0];
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
            let times = launch(&mesh(&tensor_parallel(ranks)), &[Device::flex()], |rank| {
                let group = rank.group(Axis::Tp);
                let x = Tensor::<2>::ones([rows, 16], &rank.device);
                let call = || drop(operation(x.clone(), &group));
                call();
                Ok(batch(&rank.device, &group, repeat, call).done)
            })?;
            println!("{name:>16} {:>12} {:>12.1}", rows * 64 / 1024, slowest(&times, |seconds| *seconds) * 1e6);
        }
    }
    Ok(())
}
