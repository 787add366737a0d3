//! A convolutional U-Net as one writes it with Burn for one device: convolutions with batch normalization, pooling,
//! transposed convolutions, skip connections. It learns to find the pixels of discs among squares. One line, marked
//! below, trains it in any layout of tensor and data parallelism with ZeRO.
//!
//! Each rank normalizes by the statistics of its own batch, as under PyTorch's DistributedDataParallel; the running
//! statistics are averaged over the ranks after every epoch.
//!
//! ```text
//! cargo run --release --example unet -- --ranks 2
//! cargo run --release --example unet -- --layout "TP2 DP2 ZeRO1"    # filters sharded over two ranks
//! ```

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::anyhow;
use burn::data::dataloader::{DataLoader, batcher::Batcher};
use burn::nn::conv::{Conv2d, Conv2dConfig, ConvTranspose2d, ConvTranspose2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::MaxPool2dConfig;
use burn::nn::{BatchNorm, BatchNormConfig, PaddingConfig2d};
use burn::optim::AdamWConfig;
use burn::prelude::*;
use burn::tensor::activation::relu;
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{ClassificationOutput, ExecutionStrategy, Learner, SupervisedTraining};
use burn_megatron::prelude::*;
use clap::Parser;
use examples::{Args, Dice, classification_steps, loader, report, tell, trained};

const SIZE: usize = 24;

fn main() -> ExitCode {
    report(run(&Args::parse()))
}

fn run(args: &Args) -> anyhow::Result<()> {
    let device = args.device()?;
    let (train, valid) = (loader(scenes(1536, 1), 16, Scenes), loader(scenes(128, 2), 16, Scenes));
    let model = UNet::new(&device.clone().autodiff());
    let strategy = match args.layout() {
        None => ExecutionStrategy::single(device.clone()).into(),
        Some(layout) => MegatronStrategy::mesh(layout).plan(Plan::default().columns("first.").rows("second.")).into(), // <- the line that changes
    };
    let result = SupervisedTraining::new("runs/unet", train, valid.clone())
        .metrics((LossMetric::new(), AccuracyMetric::new()))
        .num_epochs(3)
        .with_training_strategy(strategy)
        .summary()
        .launch(Learner::new(model, AdamWConfig::new().init(), 5e-3));
    let model = trained(result)?;
    let (iou, all) = iou(&model, &valid, &device)?;
    tell(format_args!("discs in scenes it never saw: IoU {iou:.3}; of calling every pixel a disc's: {all:.3}"));
    Ok(())
}

/// Two convolutions that keep the size, each with batch normalization.
#[derive(Module, Debug)]
struct Block {
    first: Conv2d,
    first_norm: BatchNorm,
    second: Conv2d,
    second_norm: BatchNorm,
}

impl Block {
    fn new([from, to]: [usize; 2], device: &Device) -> Self {
        let conv = |from| Conv2dConfig::new([from, to], [3, 3]).with_padding(PaddingConfig2d::Same).init(device);
        let norm = || BatchNormConfig::new(to).init(device);
        Self { first: conv(from), first_norm: norm(), second: conv(to), second_norm: norm() }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let x = relu(self.first_norm.forward(self.first.forward(x)));
        relu(self.second_norm.forward(self.second.forward(x)))
    }
}

#[derive(Module, Debug)]
struct UNet {
    down: Block,
    down_again: Block,
    bottom: Block,
    up: ConvTranspose2d,
    join: Block,
    up_again: ConvTranspose2d,
    join_again: Block,
    head: Conv2d,
}

impl UNet {
    fn new(device: &Device) -> Self {
        let up = |channels| ConvTranspose2dConfig::new(channels, [2, 2]).with_stride([2, 2]).init(device);
        Self {
            down: Block::new([1, 8], device),
            down_again: Block::new([8, 16], device),
            bottom: Block::new([16, 32], device),
            up: up([32, 16]),
            join: Block::new([32, 16], device),
            up_again: up([16, 8]),
            join_again: Block::new([16, 8], device),
            head: Conv2dConfig::new([8, 2], [1, 1]).init(device),
        }
    }

    fn forward(&self, (images, discs): Batch) -> ClassificationOutput {
        let pool = MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init();
        let fine = self.down.forward(images);
        let coarse = self.down_again.forward(pool.forward(fine.clone()));
        let bottom = self.bottom.forward(pool.forward(coarse.clone()));
        let x = self.join.forward(Tensor::cat(vec![coarse, self.up.forward(bottom)], 1));
        let x = self.join_again.forward(Tensor::cat(vec![fine, self.up_again.forward(x)], 1));
        // Each pixel is an item of two classes.
        let output = self.head.forward(x).permute([0, 2, 3, 1]).reshape([-1, 2]);
        let loss = CrossEntropyLossConfig::new().init(&output.device()).forward(output.clone(), discs.clone());
        ClassificationOutput::new(loss, output, discs)
    }
}

classification_steps!(UNet, Batch);

/// Intersection over union of the discs' pixels, and that of all pixels.
fn iou(model: &UNet, loader: &Arc<dyn DataLoader<Batch>>, device: &Device) -> anyhow::Result<(f64, f64)> {
    let count = |pixels: Tensor<1, Bool>| pixels.int().sum().into_scalar::<i64>() as f64;
    let (mut both, mut either, mut discs, mut all) = (0.0, 0.0, 0.0, 0.0);
    for batch in loader.to_device(device).iter() {
        let ClassificationOutput { output, targets, .. } = model.forward(batch.map_err(|error| anyhow!("{error}"))?);
        let (found, there) = (output.argmax(1).reshape([-1]).equal_elem(1), targets.clone().equal_elem(1));
        both += count(found.clone().bool_and(there.clone()));
        either += count(found.bool_or(there.clone()));
        discs += count(there);
        all += targets.dims()[0] as f64;
    }
    Ok((both / either, discs / all))
}

#[derive(Clone, Debug)]
struct Scene {
    pixels: Vec<f32>,
    discs: Vec<i64>,
}

/// Images `[batch, 1, SIZE, SIZE]`, and for each pixel of all images whether it is a disc's.
type Batch = (Tensor<4>, Tensor<1, Int>);

struct Scenes;

impl Batcher<Scene, Batch> for Scenes {
    fn batch(&self, scenes: Vec<Scene>, device: &Device) -> Batch {
        let count = scenes.len();
        let discs: Vec<i64> = scenes.iter().flat_map(|scene| scene.discs.clone()).collect();
        let pixels: Vec<f32> = scenes.into_iter().flat_map(|scene| scene.pixels).collect();
        let images = Tensor::from_data(TensorData::new(pixels, [count, 1, SIZE, SIZE]), device);
        (images, Tensor::from_data(discs.as_slice(), device))
    }
}

/// Scenes of a disc and a square of random sizes and positions, with noise. Where they overlap, the square is in front.
fn scenes(count: usize, seed: u64) -> Vec<Scene> {
    let mut dice = Dice(seed);
    let mut draw = |_| {
        let mut shape = || {
            let radius = 3.0 + 3.0 * dice.roll();
            let room = SIZE as f32 - 2.0 * radius;
            (radius, radius + dice.roll() * room, radius + dice.roll() * room)
        };
        let (disc, square) = (shape(), shape());
        let from = |at: usize, (_, cx, cy): (f32, f32, f32)| ((at % SIZE) as f32 - cx, (at / SIZE) as f32 - cy);
        let in_square = |at: usize| from(at, square).0.abs().max(from(at, square).1.abs()) < square.0;
        let in_disc = |at: usize| from(at, disc).0.hypot(from(at, disc).1) < disc.0 && !in_square(at);
        let discs: Vec<i64> = (0..SIZE * SIZE).map(|at| i64::from(in_disc(at))).collect();
        let ink = |at: usize| if discs[at] == 1 || in_square(at) { 1.0 } else { 0.0 };
        let pixels = (0..SIZE * SIZE).map(|at| ink(at) + 0.5 * dice.roll()).collect();
        Scene { pixels, discs }
    };
    (0..count).map(&mut draw).collect()
}
