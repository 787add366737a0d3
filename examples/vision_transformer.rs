//! A vision transformer as one writes it with Burn for one device: patches through a convolution, a class token,
//! learned positions, `TransformerEncoder`. It learns to classify drawn shapes. One line, marked below, trains it in
//! any layout of tensor and data parallelism with ZeRO.
//!
//! ```text
//! cargo run --release --example vision_transformer -- --layout "TP2 DP2 ZeRO2"
//! ```

use std::process::ExitCode;

use burn::data::dataloader::batcher::Batcher;
use burn::module::Param;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use burn::nn::{Initializer, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::prelude::*;
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{
    ClassificationOutput, ExecutionStrategy, InferenceStep, Learner, SupervisedTraining, TrainOutput, TrainStep,
};
use burn_megatron::prelude::*;
use clap::Parser;
use examples::{Args, Dice, accuracy, loader, report, trained};

const SIZE: usize = 16;
const PATCH: usize = 4;
const PATCHES: usize = (SIZE / PATCH) * (SIZE / PATCH);
const WIDTH: usize = 48;
/// Ring, box, cross, slash.
const SHAPES: usize = 4;

fn main() -> ExitCode {
    report(run(&Args::parse()))
}

fn run(args: &Args) -> anyhow::Result<()> {
    let device = args.device()?;
    let (train, valid) = (loader(drawings(6144, 1), 32, Drawings), loader(drawings(512, 2), 32, Drawings));
    let model = VisionTransformer::new(&device.clone().autodiff());
    let strategy = match args.layout() {
        None => ExecutionStrategy::single(device.clone()).into(),
        Some(layout) => MegatronStrategy::mesh(layout).into(), // <- the line that changes
    };
    let result = SupervisedTraining::new("runs/vision_transformer", train, valid.clone())
        .metrics((LossMetric::new(), AccuracyMetric::new()))
        .num_epochs(4)
        .with_training_strategy(strategy)
        .summary()
        .launch(Learner::new(model, AdamWConfig::new().init(), 2e-3));
    let model = trained(result)?;
    let right = accuracy(&valid, &device, |batch| model.forward(batch))?;
    println!("{:.1} % of drawings it never saw are told right; chance is 25 %", 100.0 * right);
    Ok(())
}

#[derive(Module, Debug)]
struct VisionTransformer {
    patches: Conv2d,
    class: Param<Tensor<3>>,
    positions: Param<Tensor<3>>,
    encoder: TransformerEncoder,
    norm: LayerNorm,
    head: Linear,
}

impl VisionTransformer {
    fn new(device: &Device) -> Self {
        let small = Initializer::Normal { mean: 0.0, std: 0.02 };
        Self {
            patches: Conv2dConfig::new([1, WIDTH], [PATCH, PATCH]).with_stride([PATCH, PATCH]).init(device),
            class: small.init([1, 1, WIDTH], device),
            positions: small.init([1, PATCHES + 1, WIDTH], device),
            encoder: TransformerEncoderConfig::new(WIDTH, 2 * WIDTH, 4, 2).with_norm_first(true).init(device),
            norm: LayerNormConfig::new(WIDTH).init(device),
            head: LinearConfig::new(WIDTH, SHAPES).init(device),
        }
    }

    fn forward(&self, (images, shapes): Batch) -> ClassificationOutput {
        let batch = images.dims()[0];
        let patches = self.patches.forward(images).flatten(2, 3).swap_dims(1, 2);
        let class = self.class.val().repeat_dim(0, batch);
        let embedded = Tensor::cat(vec![class, patches], 1) + self.positions.val();
        let encoded = self.encoder.forward(TransformerEncoderInput::new(embedded));
        let class = self.norm.forward(encoded).slice([0..batch, 0..1]).reshape([batch, WIDTH]);
        let output = self.head.forward(class);
        let loss = CrossEntropyLossConfig::new().init(&output.device()).forward(output.clone(), shapes.clone());
        ClassificationOutput::new(loss, output, shapes)
    }
}

impl TrainStep for VisionTransformer {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> TrainOutput<ClassificationOutput> {
        let output = self.forward(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for VisionTransformer {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> ClassificationOutput {
        self.forward(batch)
    }
}

#[derive(Clone, Debug)]
struct Drawing {
    pixels: Vec<f32>,
    shape: i64,
}

/// Images `[batch, 1, SIZE, SIZE]` and the index of the shape on each.
type Batch = (Tensor<4>, Tensor<1, Int>);

struct Drawings;

impl Batcher<Drawing, Batch> for Drawings {
    fn batch(&self, drawings: Vec<Drawing>, device: &Device) -> Batch {
        let shapes: Vec<i64> = drawings.iter().map(|drawing| drawing.shape).collect();
        let pixels: Vec<f32> = drawings.into_iter().flat_map(|drawing| drawing.pixels).collect();
        let images = Tensor::from_data(TensorData::new(pixels, [shapes.len(), 1, SIZE, SIZE]), device);
        (images, Tensor::from_data(shapes.as_slice(), device))
    }
}

/// Shapes of random size and position on noisy backgrounds.
fn drawings(count: usize, seed: u64) -> Vec<Drawing> {
    let mut dice = Dice(seed);
    let mut draw = |index: usize| {
        let shape = index % SHAPES;
        let radius = 3.0 + 3.0 * dice.roll();
        let room = SIZE as f32 - 2.0 * radius;
        let (cx, cy) = (radius + dice.roll() * room, radius + dice.roll() * room);
        let is_ink = |x: usize, y: usize| {
            let (dx, dy) = (x as f32 - cx, y as f32 - cy);
            let (far, near) = (dx.abs().max(dy.abs()), dx.abs().min(dy.abs()));
            match shape {
                0 => (dx.hypot(dy) - radius).abs() < 0.8,
                1 => (far - radius).abs() < 0.8,
                2 => far < radius && near < 0.8,
                _ => far < radius && (dx - dy).abs() < 1.1,
            }
        };
        let ink = |at: usize| if is_ink(at % SIZE, at / SIZE) { 1.0 } else { 0.0 };
        let pixels = (0..SIZE * SIZE).map(|at| ink(at) + 0.5 * dice.roll()).collect();
        Drawing { pixels, shape: shape as i64 }
    };
    (0..count).map(&mut draw).collect()
}
