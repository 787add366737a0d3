//! Batch normalization: statistics of every rank's own batches, averaged; or over all data-parallel ranks, as on one
//! device with all their images.

use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use backend_dist::fully_shard::running_states;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::module::{Lora, ModuleVisitor, Param, ParamId};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, ModuleOptimizer, SgdConfig};
use burn::prelude::*;
use burn::train::{ExecutionStrategy, Learner, LearningResult, RegressionOutput, TrainingStrategy};
use burn_megatron::prelude::*;

use crate::classifier::{Trap, generator};
use crate::cpu;
use crate::runs::{regression_steps, trained, training, zero};
use crate::setup::{difference, interleaved};
use crate::values::{All, Known};

const SIZE: usize = 6;
const BATCH: usize = 4;

#[derive(Module, Debug)]
struct Net {
    conv: Conv2d,
    norm: BatchNorm,
    head: Linear,
    last: BatchNorm,
    #[module(skip)]
    trap: Trap,
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
            trap: Trap::default(),
        };
        net.map(&mut Known::default())
    }

    fn forward(&self, (images, targets): Batch) -> RegressionOutput {
        if images.device().is_autodiff() {
            self.trap.spring();
        }
        let x = self.norm.forward(self.conv.forward(images)).tanh();
        let [batch, channels, ..] = x.dims();
        let x: Tensor<2> = x.reshape([batch as i32, channels as i32, -1]).mean_dim(2).reshape([batch, channels]);
        let predicted = self.last.forward(self.head.forward(x));
        let loss = (predicted.clone() - targets.clone()).powi_scalar(2).mean();
        RegressionOutput::new(loss, predicted, targets)
    }

    /// Running mean and variance of the first normalization.
    fn statistics(&self) -> Vec<f64> {
        let read = |tensor: Tensor<1>| tensor.into_data().iter::<f64>().collect::<Vec<_>>();
        [read(self.norm.running_mean.value_sync()), read(self.norm.running_var.value_sync())].concat()
    }

    /// Every number of the record.
    fn numbers(&self) -> Vec<f64> {
        let mut all = All::default();
        self.visit(&mut all);
        all.0
    }
}

regression_steps!(Net, Batch);

struct Images;

impl Batcher<usize, Batch> for Images {
    fn batch(&self, images: Vec<usize>, device: &Device) -> Batch {
        let pixel =
            |image: usize, at: usize| ((image * 31 + at * (image % 5 + 1)) as f64 * 0.37).sin() + image as f64 / 40.0;
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

struct Setup {
    images: Vec<usize>,
    batch: usize,
    epochs: usize,
    optimizer: fn() -> ModuleOptimizer,
    rate: f64,
    panic_at: Option<usize>,
    /// Keeps checkpoints, and resumes from that of an epoch.
    checkpoints: Option<Option<usize>>,
}

fn adamw() -> ModuleOptimizer {
    AdamWConfig::new().init()
}

impl Setup {
    fn new(images: Range<usize>) -> Self {
        let images = images.collect();
        Self { images, batch: BATCH, epochs: 2, optimizer: adamw, rate: 0.02, panic_at: None, checkpoints: None }
    }

    fn run(&self, directory: &Path, strategy: TrainingStrategy<Net>) -> LearningResult<Net> {
        let _generator = generator();
        let loaders = [loader(self.images.clone(), self.batch), loader((0..10).collect(), BATCH)];
        let training = training(directory, loaders, self.epochs, self.checkpoints, strategy);
        let mut net = Net::new();
        net.trap.panic_at = self.panic_at;
        training.launch(Learner::new(net, (self.optimizer)(), self.rate))
    }

    fn trained(&self, strategy: TrainingStrategy<Net>) -> Net {
        trained(self.run(tempfile::tempdir().unwrap().path(), strategy))
    }
}

fn one_device() -> TrainingStrategy<Net> {
    ExecutionStrategy::single(cpu()).into()
}

#[test]
fn synchronized_statistics_are_those_of_one_device_with_all_images() {
    // Not Adam, which makes steps of the rounding error that is the gradient of a bias before a normalization.
    let setup = || Setup { optimizer: || SgdConfig::new().init(), rate: 0.1, ..Setup::new(0..32) };
    for layout in ["DP2", "DP4", "DP2 ZeRO1", "DP2 ZeRO2", "DP2 ZeRO3", "TP2 DP2 ZeRO1", "TP2"] {
        let layout: ParallelLayout = layout.parse().unwrap();
        let ranks = layout.dp;
        let alone = Setup { images: interleaved(32, ranks, BATCH), batch: ranks * BATCH, ..setup() };
        let alone = alone.trained(one_device()).numbers();
        let plan = Plan::auto().columns("conv|norm.gamma|norm.beta").rows("head");
        let mesh = MegatronStrategy::mesh(layout.clone()).units(Units::auto().keep_below(2)).plan(plan);
        let run = |mesh: MeshStrategy| setup().trained(mesh.into()).numbers();
        let gap = difference(&run(mesh.clone().sync_batch_norm()), &alone);
        assert!(gap < 1e-10, "{layout}: {gap}");
        if ranks > 1 && layout.zero < 3 {
            let gap = difference(&run(mesh.clone().sync_batch_norm().overlap_grad_reduce()), &alone);
            assert!(gap < 1e-10, "{layout}, gradients reduced during the backward pass: {gap}");
        }
        if layout.tp == 1 {
            // A plan that knows none of these layers, as nobody shards them.
            let gap = difference(&run(mesh.clone().plan(Plan::auto()).sync_batch_norm()), &alone);
            assert!(gap < 1e-10, "{layout}, without a plan: {gap}");
        }
        if ranks > 1 {
            assert!(difference(&run(mesh), &alone) > 1e-6, "{layout}: there is nothing to synchronize");
        }
    }
}

#[test]
fn every_run_has_the_same_bits_in_every_zero_stage() {
    for ranks in [2, 4] {
        let setup = Setup { epochs: 3, ..Setup::new(0..96) };
        let first = setup.trained(MegatronStrategy::data_parallel(ranks)).numbers();
        assert_ne!(first, Net::new().numbers());
        for stage in [0, 0, 1, 2, 3] {
            let again = setup.trained(zero(stage, ranks)).numbers();
            assert_eq!(again, first, "{ranks} ranks, ZeRO {stage}");
        }
    }
}

#[test]
fn running_statistics_are_the_mean_of_those_that_the_ranks_would_have_alone() {
    // At this rate no weight moves, so that ranks alone meet the same activations.
    let still = |images| Setup { rate: 1e-300, ..Setup::new(images) };
    for ranks in [2, 3, 4] {
        let share = 16;
        let alone = |rank: usize| still(rank * share..(rank + 1) * share).trained(one_device()).statistics();
        let alone: Vec<Vec<f64>> = (0..ranks).map(alone).collect();
        let mean = |at: usize| alone.iter().map(|statistics| statistics[at]).sum::<f64>() / ranks as f64;
        let mean: Vec<f64> = (0..alone[0].len()).map(mean).collect();
        assert!(difference(&alone[0], &mean) > 1e-3, "the ranks' images do not differ");
        for stage in [0, 2, 3] {
            let together = still(0..ranks * share).trained(zero(stage, ranks)).statistics();
            assert!(difference(&together, &mean) < 1e-10, "{ranks} ranks: {together:?} {mean:?}");
        }
    }
}

#[test]
fn one_rank_has_the_statistics_of_one_device() {
    let one_rank = Setup::new(0..16).trained(MegatronStrategy::data_parallel(1));
    assert_eq!(one_rank.numbers(), Setup::new(0..16).trained(one_device()).numbers());
}

#[test]
fn checkpoints_hold_the_mean_and_resume_to_the_same_bits() {
    let setup = |epochs, resume| Setup { epochs, checkpoints: Some(resume), ..Setup::new(0..32) };
    for (before, after) in [(0, 0), (1, 1), (2, 0), (0, 1), (3, 3)] {
        let directory = tempfile::tempdir().unwrap();
        let whole = setup(4, None).trained(zero(before, 2)).numbers();
        let half = setup(2, None).run(directory.path(), zero(before, 2)).model.statistics();
        let resumed = setup(4, Some(2)).run(directory.path(), zero(after, 2)).model;
        assert_ne!(resumed.statistics(), half);
        assert_eq!(resumed.numbers(), whole, "ZeRO {before}, then {after}");
    }
}

#[test]
fn a_training_that_fails_returns_the_states_that_it_began_with() {
    let directory = tempfile::tempdir().unwrap();
    // After the first epoch's checkpoint.
    let setup = Setup { panic_at: Some(11), checkpoints: Some(None), ..Setup::new(0..32) };
    let result = setup.run(directory.path(), MegatronStrategy::data_parallel(2));
    assert!(result.error.expect("a rank panics").to_string().contains("ran into a wall"));
    assert_eq!(result.model.numbers(), Net::new().numbers());
}

#[derive(Default)]
struct Ids(HashSet<ParamId>);

impl ModuleVisitor for Ids {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.insert(param.id);
    }
}

#[test]
fn states_are_told_from_frozen_and_adapted_parameters() {
    let net = Net::new();
    let mut states = Ids::default();
    for norm in [&net.norm, &net.last] {
        norm.running_mean.visit(&mut states);
        norm.running_var.visit(&mut states);
    }
    assert_eq!(states.0.len(), 4);
    assert_eq!(running_states(&net), states.0);
    assert_eq!(running_states(&net.clone().freeze()), states.0);
    assert_eq!(running_states(&net.clone().apply_lora(Lora::new(1, 1.0))), states.0);
    assert!(running_states(&net.head.freeze()).is_empty());
}
