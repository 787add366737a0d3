//! Convolutions and batch normalization, sharded by sample and by filter.

use crate::harness::{Case, ints, tensor};
use backend_dist::logical::Placement::Shard;
use backend_dist::mesh::Axis;
use backend_dist::mesh_backend::Redistribute;
use backend_dist::parallelize::Plan;
use burn::module::Module;
use burn::nn::conv::{
    Conv2d, Conv2dConfig, Conv3d, Conv3dConfig, ConvTranspose2d, ConvTranspose2dConfig, ConvTranspose3d,
    ConvTranspose3dConfig,
};
use burn::nn::pool::{AdaptiveAvgPool3dConfig, AvgPool3dConfig, MaxPool2dConfig, MaxPool3dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, loss::CrossEntropyLossConfig};
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

/// A generator: numbers become an image.
#[derive(Module, Debug)]
struct Generator {
    first: Linear,
    grow: ConvTranspose2d,
    image: ConvTranspose2d,
}

#[test]
fn transposed_filters_sharded_by_output_and_input() {
    let case = Case::<Generator> {
        init: |device| {
            let grow = |channels| ConvTranspose2dConfig::new(channels, [4, 4]).with_stride([2, 2]).with_padding([1, 1]);
            Generator {
                first: LinearConfig::new(6, 16 * 4).init(device),
                grow: grow([16, 8]).init(device),
                image: grow([8, 4]).init(device),
            }
        },
        loss: |model, device, _| {
            let x = model.first.forward(tensor([8, 6], 1, device)).reshape([8, 16, 2, 2]);
            model.image.forward(relu(model.grow.forward(x))).powi_scalar(2).mean()
        },
    };
    for layout in ["TP1", "TP2", "TP4"] {
        for plan in [
            Plan::default().columns("grow").rows("image"),
            Plan::default().columns("first").rows("grow"),
            Plan::default().columns("grow|image"),
        ] {
            let report = case.check(layout, &plan);
            assert!(report.fallbacks.is_empty(), "{layout}, {plan:?}: {report}");
        }
    }
}

#[derive(Module, Debug)]
struct Volumes {
    first: Conv3d,
    grow: ConvTranspose3d,
}

#[test]
fn volumes_sharded_by_filter() {
    let case = Case::<Volumes> {
        init: |device| Volumes {
            first: Conv3dConfig::new([2, 8], [3, 3, 3]).init(device),
            grow: ConvTranspose3dConfig::new([8, 2], [2, 2, 2]).init(device),
        },
        loss: |model, device, _| {
            let x = relu(model.first.forward(tensor([2, 2, 8, 8, 8], 1, device)));
            let x = MaxPool3dConfig::new([2, 2, 2]).with_strides([1, 1, 1]).init().forward(x);
            let x = AvgPool3dConfig::new([2, 2, 2]).with_strides([1, 1, 1]).init().forward(x);
            let x = AdaptiveAvgPool3dConfig::new([2, 2, 2]).init().forward(x);
            model.grow.forward(x).powi_scalar(2).mean()
        },
    };
    for layout in ["TP1", "TP2", "TP4"] {
        let report = case.check(layout, &Plan::default().columns("first").rows("grow"));
        assert!(report.fallbacks.is_empty(), "{layout}: {report}");
    }
}

/// As in MobileNet, Mamba and ConvNeXt: a filter for each channel. And groups of two channels, plain and transposed.
#[derive(Module, Debug)]
struct Grouped {
    expand: Conv2d,
    depthwise: Conv2d,
    pairs: Conv2d,
    grow: ConvTranspose2d,
    project: Conv2d,
}

#[test]
fn groups_sharded_with_their_channels() {
    let case = Case::<Grouped> {
        init: |device| {
            let conv = |channels, size, groups| Conv2dConfig::new(channels, [size; 2]).with_groups(groups).init(device);
            Grouped {
                expand: conv([2, 8], 1, 1),
                depthwise: conv([8, 8], 3, 8),
                pairs: conv([8, 16], 3, 4),
                grow: ConvTranspose2dConfig::new([16, 8], [2, 2]).with_groups(4).init(device),
                project: conv([8, 4], 1, 1),
            }
        },
        loss: |model, device, _| {
            let x = relu(model.depthwise.forward(relu(model.expand.forward(tensor([4, 2, 8, 8], 1, device)))));
            let x = model.grow.forward(relu(model.pairs.forward(x)));
            model.project.forward(relu(x)).powi_scalar(2).mean()
        },
    };
    for layout in ["TP1", "TP2", "TP4"] {
        for columns in ["expand", "expand|depthwise|pairs", "depthwise|pairs"] {
            let report = case.check(layout, &Plan::default().columns(columns).rows("project"));
            assert!(report.fallbacks.is_empty(), "{layout}, {columns}: {report}");
        }
    }
    // Eight ranks do not divide four groups.
    let report = case.check("TP8", &Plan::default().columns("expand|depthwise"));
    assert!(report.fallbacks.keys().any(|name| name.starts_with("Conv2d")), "{report}");
}
