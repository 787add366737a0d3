//! A U-Net in pipelines: what a block hands on is a list, of the picture and of those that skip over the middle.

use std::ops::Range;

use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{Embedding, EmbeddingConfig, GroupNorm, GroupNormConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::prelude::*;
use burn::tensor::activation::silu;
use burn::train::RegressionOutput;
use burn_megatron::prelude::*;
use burn_megatron::steps_of_stages;

use crate::{layouts, proven};

const CHANNELS: usize = 4;

#[derive(Module, Debug)]
struct Unet {
    time: Embedding,
    stem: Conv2d,
    /// Two that halve the picture, two that double it.
    blocks: Vec<Block>,
    head: Conv2d,
}

#[derive(Module, Debug)]
struct Block {
    time: Linear,
    norm: GroupNorm,
    conv: Conv2d,
    /// Sums of the picture and what comes over the skip, in half of the blocks.
    join: Option<Conv2d>,
}

/// A noisy picture `[batch, 2, 8, 8]`, its noise, and its step.
#[derive(Module, Debug)]
struct Noisy {
    picture: Tensor<4>,
    noise: Tensor<4>,
    step: Tensor<1, Int>,
}

fn conv(from: usize, to: usize, device: &Device) -> Conv2d {
    Conv2dConfig::new([from, to], [3, 3]).with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1)).init(device)
}

fn halved(x: Tensor<4>) -> Tensor<4> {
    let [n, channels, height, width] = x.dims();
    let (height, width) = (height / 2, width / 2);
    x.reshape([n, channels, height, 2, width, 2]).mean_dims(&[3, 5]).reshape([n, channels, height, width])
}

fn doubled(x: Tensor<4>) -> Tensor<4> {
    let [n, channels, height, width] = x.dims();
    let x = x.reshape([n, channels, height, 1, width, 1]).expand([n, channels, height, 2, width, 2]);
    x.reshape([n, channels, 2 * height, 2 * width])
}

impl Unet {
    fn new(device: &Device) -> Self {
        let block = |at: usize| Block {
            time: LinearConfig::new(6, CHANNELS).init(device),
            norm: GroupNormConfig::new(2, CHANNELS).init(device),
            conv: conv(CHANNELS, CHANNELS, device),
            join: (at >= 2).then(|| conv(2 * CHANNELS, CHANNELS, device)),
        };
        Self {
            time: EmbeddingConfig::new(5, 6).init(device),
            stem: conv(2, CHANNELS, device),
            blocks: (0..4).map(block).collect(),
            head: conv(CHANNELS, 2, device),
        }
    }
}

impl Stages for Unet {
    /// The embedding of the time, and pictures: the last is that of now, the others wait for theirs.
    type Activation = (Tensor<2>, Vec<Tensor<4>>);

    fn blocks(&self) -> usize {
        self.blocks.len()
    }

    fn owner(&self, path: &str) -> Option<Part> {
        Part::by_path(path, "time|stem", "blocks", "head")
    }

    fn first(&self, batch: &Noisy) -> Self::Activation {
        let [n] = batch.step.dims();
        let time = self.time.forward(batch.step.clone().reshape([n, 1])).reshape([n, 6]);
        (time, vec![self.stem.forward(batch.picture.clone())])
    }

    fn block(&self, index: usize, (time, mut pictures): Self::Activation, _: &Noisy) -> Self::Activation {
        let block = &self.blocks[index];
        let x = pictures.pop().unwrap();
        let x = match &block.join {
            Some(join) => join.forward(Tensor::cat(vec![doubled(x), pictures.pop().unwrap()], 1)),
            None => x,
        };
        let [n, channels, ..] = x.dims();
        let shift = block.time.forward(silu(time.clone())).reshape([n, channels, 1, 1]);
        let y = x.clone() + block.conv.forward(silu(block.norm.forward(x) + shift));
        if block.join.is_none() {
            pictures.push(y.clone());
            pictures.push(halved(y));
        } else {
            pictures.push(y);
        }
        (time, pictures)
    }

    fn last(&self, (_, mut pictures): Self::Activation, batch: &Noisy) -> (Tensor<1>, RegressionOutput) {
        let y = self.head.forward(pictures.pop().unwrap());
        let loss = (y.clone() - batch.noise.clone()).powi_scalar(2).mean();
        let flat = |x: Tensor<4>| x.flatten::<2>(1, 3);
        (loss.clone(), RegressionOutput::new(loss, flat(y), flat(batch.noise.clone())))
    }
}

steps_of_stages!(Unet, Noisy, RegressionOutput);

fn batch(items: Range<usize>, device: &Device) -> Noisy {
    let n = items.len();
    let value = |item: usize, at: usize| ((item * 31 + at * (item % 5 + 2)) as f64 * 0.37).sin();
    let values = |seed: usize| {
        let values: Vec<f64> = items.clone().flat_map(|item| (0..128).map(move |at| value(item + seed, at))).collect();
        Tensor::from_data(TensorData::new(values, [n, 2, 8, 8]), device)
    };
    let step: Vec<i64> = items.clone().map(|item| (item % 5) as i64).collect();
    Noisy { picture: values(0), noise: values(7), step: Tensor::from_data(step.as_slice(), device) }
}

#[test]
fn pictures_that_skip_over_stages() {
    let layouts = layouts("TP1, PP2, PP4, PP2 VPP2, PP2 DP2, PP2 DP2 ZeRO1, PP2 DP2 ZeRO2, PP2 DP2 ZeRO3, TP2 PP2");
    let plan = || Plan::default().columns("time|conv").rows("join.weight");
    proven(verify_stages_as(Unet::new, batch, &layouts, &Proof::default().plan(plan())), layouts.len());
    let proof = Proof::default().plan(plan()).recompute(Recompute::full()).overlap_grad_reduce();
    proven(verify_stages_as(Unet::new, batch, &layouts, &proof), layouts.len());
}
