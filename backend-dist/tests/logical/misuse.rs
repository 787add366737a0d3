//! What a program can do wrong, and what it is told.

use crate::cpu;
use backend_dist::launch::{BoxError, Rank, launch};
use backend_dist::logical::Placement::{self, Partial, Shard};
use backend_dist::mesh::{Axis, Mesh};
use backend_dist::mesh_backend::{Redistribute, explain};
use burn::tensor::{Device, Tensor};
use std::time::{Duration, Instant};

fn error(run: impl Fn(&Rank, &Device) -> Result<(), BoxError> + Sync) -> String {
    let mesh = Mesh::new("TP2".parse().unwrap()).unwrap();
    let begun = Instant::now();
    let result = launch(&mesh, &[cpu()], |rank| run(&rank, &rank.logical_device(&[Axis::Tp])));
    assert!(begun.elapsed() < Duration::from_secs(1));
    result.unwrap_err().to_string()
}

fn moved(to: Placement) -> String {
    error(move |rank, device| {
        Tensor::<2>::ones([6, 3], device).redistribute(rank, Axis::Tp, to);
        Ok(())
    })
}

#[test]
fn a_read_on_one_rank_only_ends_and_names_the_collective() {
    let text = error(|rank, device| {
        let x = Tensor::<2>::ones([4, 6], device).redistribute(rank, Axis::Tp, Shard(1));
        if rank.rank == 0 {
            x.into_data();
        }
        Ok(())
    });
    assert!(text.contains("all-gather(dim 1)") && text.contains("rank 0"), "{text}");
}

#[test]
fn a_branch_on_one_rank_ends_and_names_both_operations() {
    let text = error(|rank, device| {
        let x = Tensor::<2>::ones([4, 6], device).redistribute(rank, Axis::Tp, Shard(1));
        match rank.rank {
            0 => x.into_data(),
            _ => x.sum().into_data(),
        };
        Ok(())
    });
    assert!(text.contains("all-gather(dim 1)") && text.contains("all-reduce(sum)"), "{text}");
}

#[test]
fn placements_that_do_not_fit_are_refused_with_the_nearest_sizes() {
    let text = moved(Shard(1));
    assert!(text.contains("Shard(1) of a tensor of shape [6, 3]: 2 ranks do not divide 3"), "{text}");
    assert!(text.contains("the nearest sizes are 2 and 4"), "{text}");
    assert!(moved(Shard(2)).contains("the last dimension is 1"));
    assert!(moved(Partial).contains("ask for Replicate or Shard"));
}

#[test]
fn tensors_of_other_devices_are_refused() {
    let text = error(|rank, _| {
        Tensor::<1>::ones([4], &rank.device).redistribute(rank, Axis::Tp, Shard(0));
        Ok(())
    });
    assert!(text.contains("on no logical device"), "{text}");
    let text = error(|rank, device| {
        Tensor::<1>::ones([4], device).redistribute(rank, Axis::Dp, Shard(0));
        Ok(())
    });
    assert!(text.contains("axis dp") && text.contains("has the axes [\"tp\"]"), "{text}");
    let text = error(|rank, _| {
        rank.logical_device(&[Axis::Tp, Axis::World]);
        Ok(())
    });
    assert!(text.contains("the axes tp and world share ranks"), "{text}");
}

#[test]
fn tensors_are_dropped_and_devices_used_again() {
    let mesh = Mesh::new("TP2".parse().unwrap()).unwrap();
    for _ in 0..3 {
        let left = launch(&mesh, &[cpu()], |rank| {
            let device = rank.logical_device(&[Axis::Tp]);
            assert_eq!(device, rank.logical_device(&[Axis::Tp]));
            let x = Tensor::<2>::ones([4, 6], &device).redistribute(&rank, Axis::Tp, Shard(1));
            let y = x.clone().matmul(x.clone().swap_dims(0, 1)).exp().sum();
            assert!((y.into_data().iter::<f64>().next().unwrap() - 16.0 * 6f64.exp()).abs() < 1e-1);
            assert_eq!(x.clone().flip([1]).into_data(), x.into_data());
            Ok(explain(&device).tensors)
        });
        assert_eq!(left.unwrap(), [0, 0]);
    }
}

/// Burn frees all graphs of the process at the end of a backward pass, whoever made them.
#[test]
fn a_rank_frees_the_graph_of_another_that_waits_for_it() {
    let mesh = Mesh::new("TP2".parse().unwrap()).unwrap();
    let sums = launch(&mesh, &[cpu()], |rank| {
        let device = rank.logical_device(&[Axis::Tp]);
        let shard = Tensor::<1>::ones([4], &device).redistribute(&rank, Axis::Tp, Shard(0));
        let x = Tensor::<1>::ones([4], &device.autodiff()).require_grad();
        match rank.rank {
            // A graph without a backward pass.
            0 => drop(x.clone() * x.exp()),
            _ => {
                std::thread::sleep(Duration::from_millis(100));
                x.exp().sum().backward();
            }
        }
        Ok(shard.into_data().iter::<f64>().sum::<f64>())
    });
    assert_eq!(sums.unwrap(), [4.0, 4.0]);
}
