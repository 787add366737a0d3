//! Random tensors are the same in every layout.

use crate::cpu;
use backend_dist::launch::launch;
use backend_dist::logical::Placement::Shard;
use backend_dist::mesh::{Axis, Mesh};
use backend_dist::mesh_backend::{LogicalDevice, LogicalOptions, Redistribute};
use burn::nn::DropoutConfig;
use burn::tensor::activation::softmax;
use burn::tensor::{Distribution, Tensor};

fn drawn(layout: &str, is_sharded: bool, fusion: bool) -> Vec<Vec<f64>> {
    let mesh = Mesh::new(layout.parse().unwrap()).unwrap();
    launch(&mesh, &[cpu()], |rank| {
        let options = LogicalOptions { fusion: Some(fusion), run_ahead: Some(fusion), ..Default::default() };
        let device = rank.logical_device_with(&[Axis::Tp], options).autodiff();
        device.seed(5);
        let mut x = Tensor::<2>::random([8, 6], Distribution::Normal(0.0, 1.0), &device);
        if is_sharded {
            x = x.redistribute(&rank, Axis::Tp, Shard(0));
        }
        let x = DropoutConfig::new(0.3).init().forward(x.require_grad());
        let ints = Tensor::<1, burn::tensor::Int>::random([5], Distribution::Uniform(0.0, 9.0), &device);
        Ok(x.into_data().iter::<f64>().chain(ints.into_data().iter::<f64>()).collect())
    })
    .unwrap()
}

/// A row's draw is the same for all of its columns, also where a fused kernel draws it.
#[test]
fn draws_of_rows_are_not_repeated_for_every_column() {
    launch(&Mesh::new("TP1".parse().unwrap()).unwrap(), &[cpu()], |rank| {
        let masked = |fusion| {
            let options = LogicalOptions { fusion: Some(fusion), run_ahead: Some(fusion), ..Default::default() };
            let device = rank.logical_device_with(&[Axis::Tp], options);
            device.seed(5);
            let x = Tensor::<2>::ones([8, 6], &device);
            let mask = Tensor::<2>::random([8, 1], Distribution::Bernoulli(0.5), &device);
            (x * mask * 2.0).into_data().iter::<f64>().collect::<Vec<_>>()
        };
        let apart = masked(false);
        assert!(apart.chunks(6).all(|row| row.iter().all(|x| *x == row[0])));
        assert_eq!(masked(true), apart);
        Ok(())
    })
    .unwrap();
}

/// A mask that is read otherwise than element by element is in memory, with the same numbers.
#[test]
fn draws_that_are_reduced_or_moved_are_those_of_their_elements() {
    let read = |layout: &str, fusion| {
        launch(&Mesh::new(layout.parse().unwrap()).unwrap(), &[cpu()], |rank| {
            let options = LogicalOptions { fusion: Some(fusion), run_ahead: Some(fusion), ..Default::default() };
            let device = rank.logical_device_with(&[Axis::Tp], options);
            device.seed(5);
            let mask = Tensor::<2>::random([8, 6], Distribution::Bernoulli(0.5), &device);
            let share = mask.clone().redistribute(&rank, Axis::Tp, Shard(1));
            let all = [mask.clone() * 3.0, mask.clone().transpose().reshape([8, 6]), share * mask.clone().sum_dim(1)];
            let softmax = softmax(mask.clone(), 1) * mask.sum_dim(0);
            Ok(all.into_iter().chain([softmax]).flat_map(|x| x.into_data().iter::<f64>().collect::<Vec<_>>()).collect())
        })
        .unwrap()
    };
    let alone: Vec<f64> = read("TP1", false).remove(0);
    for (layout, fusion) in [("TP1", true), ("TP2", false), ("TP2", true)] {
        for rank in read(layout, fusion) {
            let is_near = |(x, y): (&f64, &f64)| (x - y).abs() < 1e-12;
            assert!(rank.len() == alone.len() && rank.iter().zip(&alone).all(is_near), "{layout}, fusion {fusion}");
        }
    }
}

#[test]
fn values_and_dropout_are_the_same_bits_in_every_layout() {
    let alone = drawn("TP1", false, false).remove(0);
    let zeros = alone[..48].iter().filter(|x| **x == 0.0).count();
    assert!((5..30).contains(&zeros), "{zeros} of 48 dropped");
    let layouts =
        [("TP1", false, true), ("TP2", false, false), ("TP2", true, false), ("TP2", true, true), ("TP4", true, false)];
    for (layout, is_sharded, fusion) in layouts {
        for rank in drawn(layout, is_sharded, fusion) {
            assert_eq!(rank, alone, "{layout}, fusion {fusion}");
        }
    }
}
