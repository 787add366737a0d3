//! Random tensors are the same in every layout.

use crate::cpu;
use backend_dist::launch::launch;
use backend_dist::logical::Placement::Shard;
use backend_dist::mesh::{Axis, Mesh};
use backend_dist::mesh_backend::{LogicalDevice, LogicalOptions, Redistribute};
use burn::nn::DropoutConfig;
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
