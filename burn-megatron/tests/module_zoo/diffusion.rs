//! A diffusion model: a U-Net with time embeddings, group normalization, attention over pixels and over classes.

use std::ops::Range;

use burn::nn::attention::{CrossAttention, CrossAttentionConfig};
use burn::nn::conv::{Conv2d, Conv2dConfig, ConvTranspose2d, ConvTranspose2dConfig};
use burn::nn::{Embedding, EmbeddingConfig, GroupNorm, GroupNormConfig, Linear, LinearConfig};
use burn::prelude::*;
use burn::tensor::activation::{silu, softmax};
use burn_megatron::prelude::*;

use crate::vision::same;
use crate::{PLAIN, classes, numbers, plan, proven};

const STEPS: usize = 10;
const TIME: usize = 8;

#[derive(Module, Debug)]
struct Res {
    norm1: GroupNorm,
    conv1: Conv2d,
    time: Linear,
    norm2: GroupNorm,
    conv2: Conv2d,
    skip: Option<Conv2d>,
}

impl Res {
    fn new(from: usize, to: usize, device: &Device) -> Self {
        Self {
            norm1: GroupNormConfig::new(2, from).init(device),
            conv1: same([from, to], 3, true, device),
            time: LinearConfig::new(TIME, 2 * to).init(device),
            norm2: GroupNormConfig::new(2, to).init(device),
            conv2: same([to, to], 3, true, device),
            skip: (from != to).then(|| same([from, to], 1, true, device)),
        }
    }

    fn forward(&self, x: Tensor<4>, time: Tensor<2>) -> Tensor<4> {
        let y = self.conv1.forward(silu(self.norm1.forward(x.clone())));
        let [n, channels, _, _] = y.dims();
        let parts = self.time.forward(silu(time)).reshape([n, 2 * channels, 1, 1]).chunk(2, 1);
        let y = self.norm2.forward(y) * (parts[0].clone() + 1.0) + parts[1].clone();
        let y = self.conv2.forward(silu(y));
        y + self.skip.as_ref().map_or(x.clone(), |skip| skip.forward(x))
    }
}

/// Queries, keys and values by one convolution.
#[derive(Module, Debug)]
struct PixelAttention {
    norm: GroupNorm,
    qkv: Conv2d,
    output: Conv2d,
    heads: usize,
}

impl PixelAttention {
    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let [n, channels, height, width] = x.dims();
        let (head, pixels) = (channels / self.heads, height * width);
        let qkv = self.qkv.forward(self.norm.forward(x.clone())).reshape([n, 3, self.heads, head, pixels]);
        let part = |at: usize| qkv.clone().slice(s![.., at..at + 1, .., .., ..]).squeeze_dim::<4>(1);
        let scores = part(0).swap_dims(2, 3).matmul(part(1)) / (head as f64).sqrt();
        let y = part(2).matmul(softmax(scores, 3).swap_dims(2, 3));
        x + self.output.forward(y.reshape([n, channels, height, width]))
    }
}

#[derive(Module, Debug)]
struct Unet {
    time: (Linear, Linear),
    classes: Embedding,
    stem: Conv2d,
    down: Vec<(Res, Conv2d)>,
    middle: (Res, PixelAttention, CrossAttention, Res),
    up: Vec<(ConvTranspose2d, Res)>,
    norm: GroupNorm,
    output: Conv2d,
    /// What noise leaves of a picture, by step.
    alphas: Tensor<1>,
}

impl Unet {
    fn new(device: &Device) -> Self {
        let halve = |channels| {
            let padding = burn::nn::PaddingConfig2d::Explicit(1, 1, 1, 1);
            Conv2dConfig::new([channels; 2], [3, 3]).with_stride([2, 2]).with_padding(padding).init(device)
        };
        let double = |from, to| ConvTranspose2dConfig::new([from, to], [2, 2]).with_stride([2, 2]).init(device);
        let attention = PixelAttention {
            norm: GroupNormConfig::new(2, 8).init(device),
            qkv: same([8, 24], 1, false, device),
            output: same([8, 8], 1, true, device),
            heads: 4,
        };
        let alphas: Vec<f64> = (1..=STEPS).map(|step| (1.0 - 0.05 * step as f64).powi(2)).collect();
        Self {
            time: (LinearConfig::new(TIME, 16).init(device), LinearConfig::new(16, TIME).init(device)),
            classes: EmbeddingConfig::new(5, 8).init(device),
            stem: same([2, 4], 3, true, device),
            down: vec![(Res::new(4, 4, device), halve(4)), (Res::new(4, 8, device), halve(8))],
            middle: (
                Res::new(8, 8, device),
                attention,
                CrossAttentionConfig::new(8, 8, 4, 4, 2).with_dropout(0.0).init(device),
                Res::new(8, 8, device),
            ),
            up: vec![(double(8, 8), Res::new(16, 4, device)), (double(4, 4), Res::new(8, 4, device))],
            norm: GroupNormConfig::new(2, 4).init(device),
            output: same([4, 2], 3, true, device),
            alphas: Tensor::from_data(alphas.as_slice(), device),
        }
    }

    /// Sines and cosines of a step, through a small network.
    fn times(&self, steps: Tensor<1, Int>) -> Tensor<2> {
        let n = steps.dims()[0];
        let at = Tensor::<1, Int>::arange(0..TIME as i64 / 2, &steps.device()).float();
        let angles = steps.float().reshape([n, 1]) * (at * -0.7).exp().unsqueeze();
        let waves = Tensor::cat(vec![angles.clone().sin(), angles.cos()], 1);
        self.time.1.forward(silu(self.time.0.forward(waves)))
    }

    fn forward(&self, x: Tensor<4>, steps: Tensor<1, Int>, class: Tensor<2, Int>) -> Tensor<4> {
        let time = self.times(steps);
        let context = self.classes.forward(class);
        let mut x = self.stem.forward(x);
        let mut skips = Vec::new();
        for (res, halve) in &self.down {
            let y = res.forward(x, time.clone());
            skips.push(y.clone());
            x = halve.forward(y);
        }
        let (first, pixels, of_classes, second) = &self.middle;
        let x = pixels.forward(first.forward(x, time.clone()));
        let [n, channels, height, width] = x.dims();
        let tokens = x.clone().flatten::<3>(2, 3).swap_dims(1, 2);
        let tokens = tokens.clone() + of_classes.forward(tokens, context, None);
        let x = second.forward(tokens.swap_dims(1, 2).reshape([n, channels, height, width]), time.clone());
        let x = self.up.iter().zip(skips.into_iter().rev()).fold(x, |x, ((double, res), skip)| {
            res.forward(Tensor::cat(vec![double.forward(x), skip], 1), time.clone())
        });
        self.output.forward(silu(self.norm.forward(x)))
    }
}

#[test]
fn denoising() {
    let loss = |model: &Unet, items: Range<usize>, device: &Device| {
        let n = items.len();
        let steps = classes(&items, [n], STEPS, device);
        let alpha = model.alphas.clone().select(0, steps.clone()).reshape([n, 1, 1, 1]);
        let (clean, noise) = (numbers(&items, [n, 2, 8, 8], 0, device), numbers(&items, [n, 2, 8, 8], 1, device));
        let noisy = clean * alpha.clone().sqrt() + noise.clone() * (-alpha.clone() + 1.0).sqrt();
        let error = (model.forward(noisy, steps, classes(&items, [n, 3], 5, device)) - noise).powi_scalar(2);
        // Weighed by what is left of the picture, at most 5 (min-SNR).
        let weight = (alpha.clone() / (-alpha + 1.0)).clamp_max(5.0);
        (error * weight).mean()
    };
    let plans = [
        Plan::auto().columns("conv1|time.0|time").rows("conv2"),
        Plan::default().columns("qkv|stem|time").rows("middle.1.output.weight|down.*.1.weight"),
        Plan::auto().columns("up.*.0|output|skip"),
    ];
    for (at, of) in plans.into_iter().enumerate() {
        proven(Unet::new, loss, if at == 0 { PLAIN } else { "TP2, TP2 DP2 ZeRO3" }, plan(of));
    }
}
