//! Batch normalization over all data-parallel ranks is that of one device with all their images.

use std::path::Path;
use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::prelude::*;
use burn::train::metric::LossMetric;
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{
    ExecutionStrategy, InferenceStep, Learner, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep,
    TrainingStrategy,
};
use burn_megatron::prelude::*;

use crate::classifier::{All, Known, difference, generator, interleaved};
use crate::cpu;

const SIZE: usize = 6;
const BATCH: usize = 4;

#[derive(Module, Debug)]
struct Net {
    conv: Conv2d,
    norm: BatchNorm,
    head: Linear,
    last: BatchNorm,
}

type Batch = (Tensor<4>, Tensor<2>);

impl Net {
    fn new() -> Self {
        let device = &cpu().autodiff();
        let net = Self {
            conv: Conv2dConfig::new([1, 4], [3, 3]).init(device),
            norm: BatchNormConfig::new(4).init(device),
            head: LinearConfig::new(4, 2).init(device),
            last: BatchNormConfig::new(2).init(device),
        };
        net.map(&mut Known::default())
    }

    fn forward(&self, (images, targets): Batch) -> RegressionOutput {
        let x = self.norm.forward(self.conv.forward(images)).tanh();
        let [batch, channels, ..] = x.dims();
        let x: Tensor<2> = x.reshape([batch as i32, channels as i32, -1]).mean_dim(2).reshape([batch, channels]);
        let predicted = self.last.forward(self.head.forward(x));
        let loss = (predicted.clone() - targets.clone()).powi_scalar(2).mean();
        RegressionOutput::new(loss, predicted, targets)
    }

    fn numbers(&self) -> Vec<f64> {
        let mut all = All::default();
        self.visit(&mut all);
        all.0
    }
}

impl TrainStep for Net {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> TrainOutput<RegressionOutput> {
        let output = self.forward(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Net {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> RegressionOutput {
        self.forward(batch)
    }
}

struct Images;

impl Batcher<usize, Batch> for Images {
    fn batch(&self, images: Vec<usize>, device: &Device) -> Batch {
        let pixel = |image: usize, at: usize| ((image * 31 + at * (image % 5 + 1)) as f64 * 0.37).sin();
        let pixels: Vec<f64> = images.iter().flat_map(|&i| (0..SIZE * SIZE).map(move |at| pixel(i, at))).collect();
        let targets: Vec<f64> = images.iter().flat_map(|&i| [(i as f64 * 0.6).cos(), i as f64 / 40.0]).collect();
        let images_of = TensorData::new(pixels, [images.len(), 1, SIZE, SIZE]);
        let targets = TensorData::new(targets, [images.len(), 2]);
        (Tensor::from_data(images_of, device), Tensor::from_data(targets, device))
    }
}

fn loader(images: Vec<usize>, batch: usize) -> Arc<dyn DataLoader<Batch>> {
    DataLoaderBuilder::new(Images).batch_size(batch).build(InMemDataset::new(images))
}

/// Weights and running statistics after two epochs.
fn trained(directory: &Path, images: Vec<usize>, batch: usize, strategy: TrainingStrategy<Net>) -> Vec<f64> {
    let _generator = generator();
    let training = SupervisedTraining::new(directory, loader(images, batch), loader((0..10).collect(), BATCH))
        .metrics((LossMetric::new(),))
        .with_application_logger(None)
        .renderer(Box::new(CliMetricsRenderer::new()))
        .num_epochs(2)
        .with_training_strategy(strategy);
    // Not Adam, which makes steps of the rounding error that is the gradient of a bias before a normalization.
    let result = training.launch(Learner::new(Net::new(), SgdConfig::new().init(), 0.1));
    assert!(result.error.is_none(), "{}", result.error.unwrap());
    assert!(result.interrupted.is_none(), "{:?}", result.interrupted);
    result.model.numbers()
}

#[test]
fn synchronized_statistics_are_those_of_one_device_with_all_images() {
    for layout in ["DP2", "DP4", "DP2 ZeRO1", "DP2 ZeRO2", "DP2 ZeRO3", "TP2 DP2 ZeRO1", "TP2"] {
        let directory = tempfile::tempdir().unwrap();
        let layout: ParallelLayout = layout.parse().unwrap();
        let (ranks, images) = (layout.dp, 32);
        let one_device = ExecutionStrategy::single(cpu()).into();
        let alone = trained(directory.path(), interleaved(images, ranks, BATCH), ranks * BATCH, one_device);
        let plan = Plan::auto().columns("conv|norm.gamma|norm.beta").rows("head");
        let mesh = MegatronStrategy::mesh(layout.clone()).units(Units::auto().keep_below(2)).plan(plan);
        let run = |mesh: MeshStrategy| trained(directory.path(), (0..images).collect(), BATCH, mesh.into());
        let gap = difference(&run(mesh.clone().sync_batch_norm()), &alone);
        assert!(gap < 1e-10, "{layout}: {gap}");
        if ranks > 1 && layout.zero < 3 {
            let gap = difference(&run(mesh.clone().sync_batch_norm().overlap_grad_reduce()), &alone);
            assert!(gap < 1e-10, "{layout}, gradients reduced during the backward pass: {gap}");
        }
        if ranks > 1 {
            assert!(difference(&run(mesh), &alone) > 1e-6, "{layout}: there is nothing to synchronize");
        }
    }
}
