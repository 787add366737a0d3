//! What a program can do wrong, and what it is told.

use crate::cpu;
use backend_dist::launch::{BoxError, Rank, launch};
use backend_dist::logical::Placement::{self, Partial, Shard};
use backend_dist::mesh::{Axis, Mesh};
use backend_dist::mesh_backend::{LogicalDevice, LogicalOptions, Redistribute, explain};
use burn::tensor::{Device, Tensor};
use std::time::{Duration, Instant};

/// Runs that fail within a second, with these words: on a device that does things at once, and on one that runs ahead.
fn fails(words: &[&str], run: impl Fn(&Rank, &Device) -> Result<(), BoxError> + Sync) {
    let mesh = Mesh::new("TP2".parse().unwrap()).unwrap();
    for ahead in [false, true] {
        let options = LogicalOptions { run_ahead: Some(ahead), ..Default::default() };
        let begun = Instant::now();
        let result = launch(&mesh, &[cpu()], |rank| run(&rank, &rank.logical_device_with(&[Axis::Tp], options)));
        assert!(begun.elapsed() < Duration::from_secs(1));
        let text = result.unwrap_err().to_string();
        words.iter().for_each(|word| assert!(text.contains(word), "{text}"));
    }
}

#[test]
fn a_read_on_one_rank_only_ends_and_names_the_collective() {
    fails(&["ShardedRead", "rank 0"], |rank, device| {
        let x = Tensor::<2>::ones([4, 6], device).redistribute(rank, Axis::Tp, Shard(1));
        if rank.rank == 0 {
            x.into_data();
        }
        Ok(())
    });
}

#[test]
fn a_branch_on_one_rank_ends_and_names_both_operations() {
    fails(&["all-gather(dim 1)", "all-reduce(sum)"], |rank, device| {
        let x = Tensor::<2>::ones([4, 6], device).redistribute(rank, Axis::Tp, Shard(1));
        match rank.rank {
            0 => x.into_data(),
            _ => x.sum().into_data(),
        };
        Ok(())
    });
}

#[test]
fn an_operation_that_nobody_reads_has_failed_all_the_same() {
    // The sum of two, which wait for nobody, is a collective: the other rank has finished.
    fails(&["all-reduce(sum)", "rank 0"], |rank, device| {
        let x = Tensor::<2>::ones([4, 6], device).redistribute(rank, Axis::Tp, Shard(1));
        let sum = x.sum();
        if rank.rank == 0 {
            let _ = sum.exp();
        }
        Ok(())
    });
}

#[test]
fn placements_that_do_not_fit_are_refused_with_the_nearest_sizes() {
    let moved = |to: Placement, words: &[&str]| {
        fails(words, move |rank, device| {
            Tensor::<2>::ones([6, 3], device).redistribute(rank, Axis::Tp, to);
            Ok(())
        });
    };
    moved(
        Shard(1),
        &["Shard(1) of a tensor of shape [6, 3]: 2 ranks do not divide 3", "the nearest sizes are 2 and 4"],
    );
    moved(Shard(2), &["the last dimension is 1"]);
    moved(Partial, &["ask for Replicate or Shard"]);
}

#[test]
fn two_axes_that_do_not_divide_a_dimension_together_are_refused() {
    let mesh = Mesh::new("TP2 DP2".parse().unwrap()).unwrap();
    let result = launch(&mesh, &[cpu()], |rank| {
        let device = rank.logical_device_with(&[Axis::Dp, Axis::Tp], LogicalOptions::default());
        let x = Tensor::<2>::ones([4, 6], &device).redistribute(&rank, Axis::Dp, Shard(1));
        Ok(x.redistribute(&rank, Axis::Tp, Shard(1)).into_data().num_elements())
    });
    let text = result.unwrap_err().to_string();
    assert!(text.contains("2 more ranks do not divide 3; the nearest sizes of the part are 2 and 4"), "{text}");
}

#[test]
fn tensors_of_other_devices_are_refused() {
    fails(&["on no logical device"], |rank, _| {
        Tensor::<1>::ones([4], &rank.device).redistribute(rank, Axis::Tp, Shard(0));
        Ok(())
    });
    fails(&["axis dp", "has the axes [\"tp\"]"], |rank, device| {
        Tensor::<1>::ones([4], device).redistribute(rank, Axis::Dp, Shard(0));
        Ok(())
    });
    fails(&["the axes tp and world share ranks"], |rank, _| {
        rank.logical_device(&[Axis::Tp, Axis::World]);
        Ok(())
    });
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
