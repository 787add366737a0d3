//! A convolution with batch normalization over ranks.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use backend_dist::fully_shard::{Units, running_states};
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::module::{Lora, ModuleMapper, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, FloatDType, TensorData};
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{
    ExecutionStrategy, InferenceStep, Learner, LearningResult, RegressionOutput, SupervisedTraining, TrainOutput,
    TrainStep, TrainingStrategy,
};

use super::*;
use crate::learner::MegatronStrategy;
use crate::learner::tests::worst;

const SIZE: usize = 6;
const BATCH: usize = 4;

#[derive(Module, Debug)]
struct Net {
    conv: Conv2d,
    norm: BatchNorm,
    head: Linear,
    #[module(skip)]
    trap: Trap,
}

/// Panics at a step of all ranks.
#[derive(Clone, Debug, Default)]
struct Trap {
    steps: Arc<AtomicUsize>,
    at: Option<usize>,
}

impl Net {
    fn new() -> Self {
        let device = &Device::flex().autodiff();
        let net = Self {
            conv: Conv2dConfig::new([1, 3], [3, 3]).init(device),
            norm: BatchNormConfig::new(3).init(device),
            head: LinearConfig::new(3, 1).init(device),
            trap: Trap::default(),
        };
        net.map(&mut Known(FloatDType::F64, 0))
    }

    fn forward(&self, (images, targets): Batch) -> RegressionOutput {
        let x = self.norm.forward(self.conv.forward(images)).tanh();
        let [batch, channels, ..] = x.dims();
        let x: Tensor<2> = x.reshape([batch as i32, channels as i32, -1]).mean_dim(2).reshape([batch, channels]);
        let predicted = self.head.forward(x);
        let loss = (predicted.clone() - targets.clone()).powi_scalar(2).mean();
        RegressionOutput::new(loss, predicted, targets)
    }

    /// Running mean and variance.
    fn statistics(&self) -> Vec<f64> {
        let read = |tensor: Tensor<1>| tensor.into_data().iter::<f64>().collect::<Vec<_>>();
        [read(self.norm.running_mean.value_sync()), read(self.norm.running_var.value_sync())].concat()
    }

    /// Every number of the record.
    fn record(&self) -> Vec<f64> {
        let mut all = All::default();
        self.visit(&mut all);
        all.0
    }
}

#[derive(Default)]
struct All(Vec<f64>);

impl ModuleVisitor for All {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.extend(param.val().into_data().iter::<f64>());
    }
}

/// Gives parameters a number type, and values that do not depend on a generator.
struct Known(FloatDType, usize);

impl ModuleMapper for Known {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.1 += 1;
        let (dtype, index) = (self.0, self.1);
        param.map(|old| {
            let grad = old.is_require_grad();
            let mut values: Vec<f64> = old.to_data().iter::<f64>().collect();
            if grad {
                let value = |i: usize| ((i * 7 + index) as f64 * 0.9).sin() / 2.0;
                values.iter_mut().enumerate().for_each(|(i, old)| *old = value(i));
            }
            let data = TensorData::new(values, old.dims());
            Tensor::from_data(data, (&old.device(), dtype.into())).set_require_grad(grad)
        })
    }
}

type Batch = (Tensor<4>, Tensor<2>);

#[derive(Clone, Debug)]
struct Image(usize);

struct Images(FloatDType);

impl Batcher<Image, Batch> for Images {
    fn batch(&self, images: Vec<Image>, device: &Device) -> Batch {
        let count = images.len();
        let pixel =
            |image: usize, at: usize| ((image * 31 + at * (image % 5 + 1)) as f64 * 0.37).sin() + image as f64 / 40.0;
        let pixels = images.iter().flat_map(|image| (0..SIZE * SIZE).map(|at| pixel(image.0, at))).collect::<Vec<_>>();
        let targets: Vec<f64> = images.iter().map(|image| (image.0 as f64 * 0.6).cos()).collect();
        let options = (device, self.0.into());
        let images = Tensor::from_data(TensorData::new(pixels, [count, 1, SIZE, SIZE]), options);
        (images, Tensor::from_data(TensorData::new(targets, [count, 1]), (device, self.0.into())))
    }
}

impl TrainStep for Net {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> TrainOutput<RegressionOutput> {
        let step = self.trap.steps.fetch_add(1, Ordering::SeqCst) + 1;
        assert!(self.trap.at != Some(step), "the model ran into a wall");
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

fn loader(images: std::ops::Range<usize>, dtype: FloatDType) -> Arc<dyn DataLoader<Batch>> {
    let images = images.map(Image).collect();
    DataLoaderBuilder::new(Images(dtype)).batch_size(BATCH).build(InMemDataset::new(images))
}

struct Setup {
    images: std::ops::Range<usize>,
    epochs: usize,
    rate: f64,
    dtype: FloatDType,
    panic_at: Option<usize>,
    /// Keeps checkpoints, and resumes from that of an epoch.
    checkpoints: Option<Option<usize>>,
}

impl Setup {
    fn new(images: std::ops::Range<usize>) -> Self {
        Self { images, epochs: 2, rate: 0.02, dtype: FloatDType::F64, panic_at: None, checkpoints: None }
    }

    fn run(&self, directory: &Path, strategy: TrainingStrategy<Net>) -> LearningResult<Net> {
        let (train, valid) = (loader(self.images.clone(), self.dtype), loader(0..4, self.dtype));
        let mut training = SupervisedTraining::new(directory, train, valid)
            .with_application_logger(None)
            .renderer(Box::new(CliMetricsRenderer::new()))
            .num_epochs(self.epochs)
            .with_training_strategy(strategy);
        let mut net = Net::new().map(&mut Known(self.dtype, 0));
        net.trap.at = self.panic_at;
        if let Some(resume) = self.checkpoints {
            training = training.with_default_checkpointers();
            if let Some(epoch) = resume {
                training = training.checkpoint(epoch);
            }
        }
        training.launch(Learner::new(net, AdamWConfig::new().init(), self.rate))
    }

    fn trained(&self, strategy: TrainingStrategy<Net>) -> Net {
        let result = self.run(tempfile::tempdir().unwrap().path(), strategy);
        assert!(result.error.is_none(), "{}", result.error.unwrap());
        assert!(result.interrupted.is_none(), "{:?}", result.interrupted);
        result.model
    }
}

/// ZeRO on CPU ranks; stage 3 shards small parameters too.
fn strategy(zero: u8, ranks: usize) -> TrainingStrategy<Net> {
    match zero {
        3 => MegatronStrategy::fully_shard(vec![Device::flex(); ranks], Units::auto().keep_below(2)),
        _ => MegatronStrategy::zero(zero, ranks),
    }
}

#[test]
fn every_run_has_the_same_bits_in_every_zero_stage() {
    for ranks in [2, 4] {
        let setup = Setup { epochs: 3, ..Setup::new(0..96) };
        let first = setup.trained(MegatronStrategy::data_parallel(ranks)).record();
        assert_ne!(first, Net::new().record());
        for zero in [0, 0, 1, 2, 3] {
            let again = setup.trained(strategy(zero, ranks)).record();
            assert_eq!(again, first, "{ranks} ranks, ZeRO {zero}");
        }
    }
}

#[test]
fn running_statistics_are_the_mean_of_those_that_the_ranks_would_have_alone() {
    // At this rate no weight moves, so that ranks alone meet the same activations.
    let still = |images| Setup { rate: 1e-300, ..Setup::new(images) };
    for ranks in [2, 3, 4] {
        let share = 16;
        let alone = |rank: usize| {
            let one_device = ExecutionStrategy::single(Device::flex()).into();
            still(rank * share..(rank + 1) * share).trained(one_device).statistics()
        };
        let alone: Vec<Vec<f64>> = (0..ranks).map(alone).collect();
        let mean = |at: usize| alone.iter().map(|statistics| statistics[at]).sum::<f64>() / ranks as f64;
        let mean: Vec<f64> = (0..alone[0].len()).map(mean).collect();
        assert!(worst(&alone[0], &mean) > 1e-3, "the ranks' images do not differ");
        for zero in [0, 2, 3] {
            let together = still(0..ranks * share).trained(strategy(zero, ranks)).statistics();
            assert!(worst(&together, &mean) < 1e-10, "{ranks} ranks: {together:?} {mean:?}");
        }
    }
}

#[test]
fn one_rank_has_the_statistics_of_one_device() {
    let one_device = Setup::new(0..16).trained(ExecutionStrategy::single(Device::flex()).into());
    let one_rank = Setup::new(0..16).trained(MegatronStrategy::data_parallel(1));
    assert_eq!(one_rank.record(), one_device.record());
}

#[test]
fn checkpoints_hold_the_mean_and_resume_to_the_same_bits() {
    // burn-train restores the optimizer's state in f32.
    let setup =
        |epochs, resume| Setup { epochs, dtype: FloatDType::F32, checkpoints: Some(resume), ..Setup::new(0..32) };
    for (before, after) in [(0, 0), (1, 1), (2, 0), (0, 1), (3, 3)] {
        let directory = tempfile::tempdir().unwrap();
        let whole = setup(4, None).trained(strategy(before, 2)).record();
        let half = setup(2, None).run(directory.path(), strategy(before, 2)).model.statistics();
        let resumed = setup(4, Some(2)).run(directory.path(), strategy(after, 2)).model;
        assert_ne!(resumed.statistics(), half);
        assert_eq!(resumed.record(), whole, "ZeRO {before}, then {after}");
    }
}

#[test]
fn a_training_that_fails_returns_the_states_that_it_began_with() {
    let directory = tempfile::tempdir().unwrap();
    // After the first epoch's checkpoint.
    let setup = Setup { panic_at: Some(11), checkpoints: Some(None), ..Setup::new(0..32) };
    let result = setup.run(directory.path(), MegatronStrategy::data_parallel(2));
    assert!(result.error.expect("a rank panics").to_string().contains("ran into a wall"));
    assert_eq!(result.model.record(), Net::new().record());
}

fn ids<M: Module>(module: &M) -> HashSet<ParamId> {
    let mut ids = Ids::default();
    module.visit(&mut ids);
    ids.0
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
    let states = &ids(&net.norm.running_mean) | &ids(&net.norm.running_var);
    assert_eq!(states.len(), 2);
    assert_eq!(running_states(&net), states);
    assert_eq!(running_states(&net.clone().freeze()), states);
    assert_eq!(running_states(&net.clone().apply_lora(Lora::new(1, 1.0))), states);
    assert!(running_states(&net.head.freeze()).is_empty());
}

#[test]
fn own_states_keep_values_and_ids_and_no_other_module_changes_them() {
    let net = Net::new();
    let images = || Images(FloatDType::F64).batch(vec![Image(1), Image(2)], &Device::flex().autodiff()).0;
    let forward = |net: &Net| drop(net.norm.forward(net.conv.forward(images())));
    forward(&net);
    let own = with_own_states(&net);
    let before = net.statistics();
    assert_ne!(before, Net::new().statistics());
    assert_eq!((own.statistics(), ids(&own), running_states(&own)), (before.clone(), ids(&net), running_states(&net)));
    forward(&own);
    assert_eq!(net.statistics(), before);
    assert_ne!(own.statistics(), before);
    // A clone shares them: without this there would be nothing to do here.
    forward(&net.clone());
    assert_ne!(net.statistics(), before);
}
