//! Convolutions and batch normalization, sharded by sample and by filter.

use crate::harness::{Case, ints, tensor};
use backend_dist::logical::Placement::Shard;
use backend_dist::mesh::Axis;
use backend_dist::mesh_backend::Redistribute;
use backend_dist::parallelize::Plan;
use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, loss::CrossEntropyLossConfig, pool::MaxPool2dConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Int, Tensor};

#[derive(Module, Debug)]
struct Net {
    first: Conv2d,
    norm: BatchNorm,
    second: Conv2d,
    classify: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        Self {
            first: Conv2dConfig::new([1, 8], [3, 3]).init(device),
            norm: BatchNormConfig::new(8).init(device),
            second: Conv2dConfig::new([8, 16], [3, 3]).init(device),
            classify: LinearConfig::new(16 * 2 * 2, 4).init(device),
        }
    }

    fn loss(&self, images: Tensor<4>, labels: Tensor<1, Int>) -> Tensor<1> {
        let pool = MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init();
        let x = pool.forward(relu(self.norm.forward(self.first.forward(images))));
        let x = pool.forward(relu(self.second.forward(x)));
        let logits = self.classify.forward(x.flatten(1, 3));
        // The running statistics are part of what must be equal.
        let statistics = self.norm.running_mean.value().sum() + self.norm.running_var.value().sum();
        CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, labels) + statistics
    }
}

#[test]
fn images_sharded_by_sample() {
    let case = Case::<Net> {
        init: Net::new,
        loss: |model, device, rank| {
            let mut images = tensor([8, 1, 16, 16], 1, device);
            if let Some(rank) = rank {
                images = images.redistribute(rank, Axis::Tp, Shard(0));
            }
            model.loss(images, ints([8], 4, device))
        },
    };
    for layout in ["TP1", "TP2", "TP4"] {
        let report = case.check(layout, &Plan::default());
        assert!(report.fallbacks.is_empty(), "{layout}: {report}");
    }
}

#[test]
fn filters_sharded_by_output_and_input() {
    let case = Case::<Net> {
        init: Net::new,
        loss: |model, device, _| model.loss(tensor([8, 1, 16, 16], 1, device), ints([8], 4, device)),
    };
    for layout in ["TP1", "TP2", "TP4"] {
        let report = case.check(layout, &Plan::default().columns("first").rows("second"));
        assert!(report.fallbacks.is_empty(), "{layout}: {report}");
    }
}
