//! Networks of images: residual, inverted residual, a generator with its critic, other layers.

use std::ops::Range;

use burn::nn::conv::{Conv2d, Conv2dConfig, ConvTranspose2d, ConvTranspose2dConfig, DeformConv2d, DeformConv2dConfig};
use burn::nn::interpolate::{Interpolate2d, Interpolate2dConfig, InterpolateMode};
use burn::nn::loss::{CrossEntropyLossConfig, HuberLossConfig, Reduction};
use burn::nn::pool::{
    AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig, AvgPool2d, AvgPool2dConfig, MaxPool2d, MaxPool2dConfig,
};
use burn::nn::{
    BatchNorm, BatchNormConfig, GroupNorm, GroupNormConfig, InstanceNorm, InstanceNormConfig, LeakyRelu,
    LeakyReluConfig, Linear, LinearConfig, PRelu, PReluConfig, PaddingConfig2d, Relu,
};
use burn::prelude::*;
use burn::tensor::activation::{relu6, sigmoid};
use burn_megatron::prelude::*;

use crate::{PLAIN, classes, numbers, plan, proven};

pub fn same(channels: [usize; 2], kernel: usize, bias: bool, device: &Device) -> Conv2d {
    let padding = PaddingConfig2d::Explicit(kernel / 2, kernel / 2, kernel / 2, kernel / 2);
    Conv2dConfig::new(channels, [kernel; 2]).with_padding(padding).with_bias(bias).init(device)
}

/// ResNet's basic block; group normalization instead of that of batches.
#[derive(Module, Debug)]
struct Block {
    conv1: Conv2d,
    norm1: GroupNorm,
    conv2: Conv2d,
    norm2: GroupNorm,
    relu: Relu,
    downsample: Option<Conv2d>,
}

#[derive(Module, Debug)]
struct ResNet {
    stem: Conv2d,
    pool: MaxPool2d,
    blocks: Vec<Block>,
    average: AdaptiveAvgPool2d,
    head: Linear,
}

impl Block {
    fn new(channels: [usize; 2], device: &Device) -> Self {
        let down = || Conv2dConfig::new(channels, [1, 1]).with_stride([2, 2]).with_bias(false).init(device);
        let stride = if channels[0] == channels[1] { 1 } else { 2 };
        let padding = PaddingConfig2d::Explicit(1, 1, 1, 1);
        let conv1 = Conv2dConfig::new(channels, [3, 3]).with_stride([stride; 2]).with_padding(padding);
        Self {
            conv1: conv1.with_bias(false).init(device),
            norm1: GroupNormConfig::new(2, channels[1]).init(device),
            conv2: same([channels[1]; 2], 3, false, device),
            norm2: GroupNormConfig::new(2, channels[1]).init(device),
            relu: Relu::new(),
            downsample: (stride == 2).then(down),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let y = self.relu.forward(self.norm1.forward(self.conv1.forward(x.clone())));
        let y = self.norm2.forward(self.conv2.forward(y));
        let x = if let Some(down) = &self.downsample { down.forward(x) } else { x };
        self.relu.forward(x + y)
    }
}

#[test]
fn residual_network() {
    let make = |device: &Device| ResNet {
        stem: same([3, 4], 3, false, device),
        pool: MaxPool2dConfig::new([3, 3])
            .with_strides([2, 2])
            .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
            .init(),
        blocks: vec![Block::new([4, 4], device), Block::new([4, 8], device)],
        average: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
        head: LinearConfig::new(8, 4).init(device),
    };
    let loss = |model: &ResNet, items: Range<usize>, device: &Device| {
        let n = items.len();
        let x = model.pool.forward(model.stem.forward(numbers(&items, [n, 3, 8, 8], 0, device)));
        let x = model.blocks.iter().fold(x, |x, block| block.forward(x));
        let logits = model.head.forward(model.average.forward(x).flatten::<2>(1, 3));
        let smoothing = CrossEntropyLossConfig::new().with_smoothing(Some(0.1));
        smoothing.init(device).forward(logits, classes(&items, [n], 4, device))
    };
    proven(make, loss, PLAIN, plan(Plan::auto().columns("conv1").rows("conv2")));
}

/// MobileNetV2's inverted residual, with the norm of each image.
#[derive(Module, Debug)]
struct Inverted {
    expand: Conv2d,
    norm: InstanceNorm,
    depthwise: Conv2d,
    project: Conv2d,
    prelu: PRelu,
}

#[test]
fn inverted_residual() {
    let make = |device: &Device| {
        (0..2)
            .map(|_| Inverted {
                expand: same([4, 8], 1, false, device),
                norm: InstanceNormConfig::new(8).init(device),
                depthwise: Conv2dConfig::new([8, 8], [3, 3])
                    .with_groups(8)
                    .with_padding(PaddingConfig2d::Same)
                    .init(device),
                project: same([8, 4], 1, true, device),
                prelu: PReluConfig::new().with_num_parameters(4).init(device),
            })
            .collect::<Vec<_>>()
    };
    let loss = |model: &Vec<Inverted>, items: Range<usize>, device: &Device| {
        let x = numbers(&items, [items.len(), 4, 5, 5], 1, device);
        let y = model.iter().fold(x, |x, block| {
            let y = relu6(block.norm.forward(block.expand.forward(x.clone())));
            let y = relu6(block.depthwise.forward(y) * 3.0);
            x + block.prelu.forward(block.project.forward(y))
        });
        y.powi_scalar(2).mean_dims(&[1, 2, 3]).sqrt().mean()
    };
    proven(make, loss, PLAIN, plan(Plan::default().columns("expand").rows("project")));
    // As a user would who wants all of it sharded.
    let everything = Plan::default().columns("expand|depthwise").rows("project");
    proven(make, loss, "TP2, TP4, TP2 DP2 ZeRO3", plan(everything));
}

/// WGAN: a generator of transposed convolutions and its critic.
#[derive(Module, Debug)]
struct Gan {
    latent: Linear,
    up1: ConvTranspose2d,
    norm: BatchNorm,
    up2: ConvTranspose2d,
    critic: Critic,
}

#[derive(Module, Debug)]
struct Critic {
    conv: Conv2d,
    leaky: LeakyRelu,
    head: Linear,
}

impl Gan {
    fn new(device: &Device) -> Self {
        let up = |channels| ConvTranspose2dConfig::new(channels, [4, 4]).with_stride([2, 2]).with_padding([1, 1]);
        Self {
            latent: LinearConfig::new(6, 8 * 4).init(device),
            up1: up([8, 4]).with_bias(false).init(device),
            norm: BatchNormConfig::new(4).init(device),
            up2: up([4, 2]).init(device),
            critic: Critic {
                conv: Conv2dConfig::new([2, 4], [4, 4]).with_stride([2, 2]).init(device),
                leaky: LeakyReluConfig::new().with_negative_slope(0.2).init(),
                head: LinearConfig::new(4 * 9, 1).init(device),
            },
        }
    }

    fn loss(&self, z: Tensor<2>, real: Tensor<4>, norm: bool) -> Tensor<1> {
        let n = z.dims()[0];
        let x = self.up1.forward(self.latent.forward(z).reshape([n, 8, 2, 2]));
        let x = if norm { self.norm.forward(x) } else { x };
        let fake = self.up2.forward(x.tanh()).tanh();
        let judge = |x: Tensor<4>| {
            let x = self.critic.leaky.forward(self.critic.conv.forward(x));
            self.critic.head.forward(x.flatten::<2>(1, 3)).mean()
        };
        // Of the critic with a detached picture, and of the generator.
        judge(fake.clone().detach()) - judge(real) - judge(fake) * 0.5
    }
}

fn of_gan(norm: bool) -> impl Fn(&Gan, Range<usize>, &Device) -> Tensor<1> {
    move |model: &Gan, items: Range<usize>, device: &Device| {
        let n = items.len();
        model.loss(numbers(&items, [n, 6], 4, device), numbers(&items, [n, 2, 8, 8], 5, device), norm)
    }
}

#[test]
fn generator_and_critic() {
    let plans = [
        Plan::default().columns("latent|conv").rows("head.weight"),
        Plan::default().columns("up1|up2.weight").rows("head.weight"),
        Plan::default().rows("up1.weight|up2.weight|conv.weight"),
    ];
    for (at, of) in plans.into_iter().enumerate() {
        proven(Gan::new, of_gan(false), if at == 0 { PLAIN } else { "TP2, TP2 DP2 ZeRO3" }, plan(of.clone()));
        proven(Gan::new, of_gan(true), "TP2", plan(of));
    }
}

/// Layers that have no rule of their own.
#[derive(Module, Debug)]
struct Odd {
    conv: Conv2d,
    offset: Conv2d,
    deform: DeformConv2d,
    pool: AvgPool2d,
    grow: Interpolate2d,
    head: Linear,
}

#[test]
fn deformed_and_resized() {
    let make = |device: &Device| Odd {
        conv: same([2, 4], 3, true, device),
        offset: same([4, 18], 3, true, device),
        deform: DeformConv2dConfig::new([4, 4], [3, 3])
            .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
            .init(device),
        pool: AvgPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
        grow: Interpolate2dConfig::new().with_output_size(Some([5, 7])).with_mode(InterpolateMode::Linear).init(),
        head: LinearConfig::new(4 * 35, 3).init(device),
    };
    let loss = |model: &Odd, items: Range<usize>, device: &Device| {
        let n = items.len();
        let x = model.conv.forward(numbers(&items, [n, 2, 6, 6], 6, device));
        let x = model.deform.forward(x.clone(), model.offset.forward(x).tanh(), None);
        let x = model.grow.forward(model.pool.forward(sigmoid(x)));
        let y = model.head.forward(x.reshape([n as i32, -1]));
        HuberLossConfig::new(0.5).init().forward(y, numbers(&items, [n, 3], 7, device), Reduction::Mean)
    };
    // Burn computes it on a CPU in f32, of other sums where the batch is divided.
    proven(make, loss, "TP2, TP4", plan(Plan::default().columns("conv").rows("deform|head.weight")));
}
