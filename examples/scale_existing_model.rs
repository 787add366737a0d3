//! A Burn program as one writes it for one device: a small convolutional network learns to classify drawn shapes.
//! One line, marked below, trains it with data parallelism; `MegatronStrategy::zero(2, ranks)` there also shards the
//! optimizer states and gradients.
//!
//! ```text
//! cargo run --release --example scale_existing_model               # one device, burn-train's own strategy
//! cargo run --release --example scale_existing_model -- --ranks 2  # two ranks, each with half of the data
//! cargo run --release --example scale_existing_model --features cuda -- --device cuda --ranks 4  # GPUs 0 to 3
//! ```

use std::sync::Arc;

use burn::data::dataloader::{DataLoader, DataLoaderBuilder, batcher::Batcher};
use burn::data::dataset::InMemDataset;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig, pool::MaxPool2dConfig};
use burn::optim::AdamWConfig;
use burn::prelude::*;
use burn::tensor::activation::relu;
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{
    ClassificationOutput, ExecutionStrategy, InferenceStep, Learner, SupervisedTraining, TrainOutput, TrainStep,
};
use burn_megatron::cli::device::DeviceChoice;
use burn_megatron::prelude::*;
use clap::Parser;

/// Trains a small network on drawn shapes, on one device or data parallel.
#[derive(Parser)]
struct Args {
    /// Data-parallel ranks; without it burn-train's own strategy trains on one device
    #[arg(long, value_name = "N")]
    ranks: Option<usize>,
    /// Device of the ranks
    #[arg(long, value_enum, default_value = "cpu")]
    device: DeviceChoice,
}

const SIZE: usize = 16;
const BATCH: usize = 64;

fn main() {
    let Args { ranks, device } = Args::parse();
    if ranks == Some(0) {
        eprintln!("error: --ranks 0: at least 1 rank trains");
        std::process::exit(2);
    }
    let device = match device.kind().devices(&ParallelLayout::default()) {
        Ok(devices) => devices[0].clone(),
        Err(error) => {
            eprintln!("error: {error:#}");
            std::process::exit(1);
        }
    };
    let model = Net::new(&device.clone().autodiff());
    let strategy = match ranks {
        None => ExecutionStrategy::single(device).into(),
        Some(ranks) => MegatronStrategy::data_parallel(ranks), // <- the line that changes
    };
    let result = SupervisedTraining::new("runs/scale_existing_model", drawings(4096, 1), drawings(512, 2))
        .metrics((LossMetric::new(), AccuracyMetric::new()))
        .num_epochs(4)
        .with_training_strategy(strategy)
        .summary()
        .launch(Learner::new(model, AdamWConfig::new().init(), 2e-3));
    if result.error.is_some() {
        std::process::exit(1);
    }
}

#[derive(Module, Debug)]
struct Net {
    first: Conv2d,
    second: Conv2d,
    classify: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        Self {
            first: Conv2dConfig::new([1, 8], [3, 3]).init(device),
            second: Conv2dConfig::new([8, 16], [3, 3]).init(device),
            classify: LinearConfig::new(16 * 2 * 2, Shape::COUNT).init(device),
        }
    }

    fn forward(&self, (images, shapes): Batch) -> ClassificationOutput {
        let pool = MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init();
        let x = pool.forward(relu(self.first.forward(images)));
        let x = pool.forward(relu(self.second.forward(x)));
        let output = self.classify.forward(x.flatten(1, 3));
        let loss = CrossEntropyLossConfig::new().init(&output.device()).forward(output.clone(), shapes.clone());
        ClassificationOutput::new(loss, output, shapes)
    }
}

impl TrainStep for Net {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> TrainOutput<ClassificationOutput> {
        let output = self.forward(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Net {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> ClassificationOutput {
        self.forward(batch)
    }
}

/// Images `[batch, 1, SIZE, SIZE]` and the index of the shape on each.
type Batch = (Tensor<4>, Tensor<1, Int>);

#[derive(Clone, Debug)]
struct Drawing {
    pixels: Vec<f32>,
    shape: i64,
}

struct Drawings;

impl Batcher<Drawing, Batch> for Drawings {
    fn batch(&self, drawings: Vec<Drawing>, device: &Device) -> Batch {
        let shapes: Vec<i64> = drawings.iter().map(|drawing| drawing.shape).collect();
        let pixels: Vec<f32> = drawings.iter().flat_map(|drawing| drawing.pixels.clone()).collect();
        let images = Tensor::from_data(TensorData::new(pixels, [shapes.len(), 1, SIZE, SIZE]), device);
        (images, Tensor::from_data(shapes.as_slice(), device))
    }
}

fn drawings(count: usize, seed: u64) -> Arc<dyn DataLoader<Batch>> {
    let mut dice = Dice(seed);
    let drawings = (0..count).map(|_| Shape::draw(&mut dice)).collect();
    DataLoaderBuilder::new(Drawings).batch_size(BATCH).shuffle(seed).build(InMemDataset::new(drawings))
}

/// The four shapes: ring, box, cross, slash.
struct Shape;

impl Shape {
    const COUNT: usize = 4;

    /// One shape of random size and position on a noisy background.
    fn draw(dice: &mut Dice) -> Drawing {
        let shape = (dice.roll() * Self::COUNT as f32) as i64;
        let radius = 3.0 + 3.0 * dice.roll();
        let (cx, cy) = (radius + dice.roll() * (16.0 - 2.0 * radius), radius + dice.roll() * (16.0 - 2.0 * radius));
        let pixel = |x: usize, y: usize| {
            let (dx, dy) = (x as f32 - cx, y as f32 - cy);
            let (far, near) = (dx.abs().max(dy.abs()), dx.abs().min(dy.abs()));
            let inked = match shape {
                0 => (dx.hypot(dy) - radius).abs() < 0.8,
                1 => (far - radius).abs() < 0.8,
                2 => far < radius && near < 0.8,
                _ => far < radius && (dx - dy).abs() < 1.1,
            };
            if inked { 1.0 } else { 0.0 }
        };
        let pixels = (0..SIZE * SIZE).map(|i| pixel(i % SIZE, i / SIZE) + 0.6 * dice.roll()).collect();
        Drawing { pixels, shape }
    }
}

/// A splitmix64 generator of numbers in `[0, 1)`.
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1u64 << 24) as f32
    }
}
