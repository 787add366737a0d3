//! The data of the classifier, and a training of it.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::grad_clipping::GradientClippingConfig;
use burn::nn::BatchNormConfig;
use burn::optim::AdamWConfig;
use burn::prelude::*;
use burn::train::metric::{AccuracyMetric, LearningRateMetric, LossMetric};
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{Learner, LearningResult, SupervisedTraining, TrainingStrategy};

use crate::classifier::{Batch, CLASSES, Classifier, LENGTH, Trap, VOCABULARY, WIDTH, generator};
use crate::cpu;

struct Numbered;

impl Batcher<usize, Batch> for Numbered {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Batch {
        let count = items.len();
        let token = |item: usize, at: usize| (item * 7 + at * at + item / 5) % VOCABULARY;
        let tokens: Vec<i64> =
            items.iter().flat_map(|&item| (0..LENGTH).map(move |at| token(item, at) as i64)).collect();
        let classes: Vec<i64> = items.iter().map(|item| (item % CLASSES) as i64).collect();
        let tokens = Tensor::<2, Int>::from_data(TensorData::new(tokens, [count, LENGTH]), device);
        let ends = Tensor::<1, Int>::from_data(
            items.iter().map(|item| (3 + item % 4) as i64).collect::<Vec<_>>().as_slice(),
            device,
        );
        let positions = Tensor::<1, Int>::arange(0..LENGTH as i64, device).reshape([1, LENGTH]).repeat_dim(0, count);
        let padding = positions.greater_equal(ends.reshape([count, 1]).repeat_dim(1, LENGTH));
        Batch { tokens, padding, classes: Tensor::from_data(classes.as_slice(), device) }
    }
}

/// How items come.
#[derive(Clone, Copy, Debug, Default)]
pub struct Order {
    pub shuffle: bool,
    pub workers: usize,
}

pub fn loader(items: Vec<usize>, batch: usize, order: Order) -> Arc<dyn DataLoader<Batch>> {
    let mut builder = DataLoaderBuilder::new(Numbered).batch_size(batch);
    if order.shuffle {
        builder = builder.shuffle(3);
    }
    if order.workers > 0 {
        builder = builder.num_workers(order.workers);
    }
    builder.build(InMemDataset::new(items))
}

/// The order in which one device with the larger batch meets the items that `ranks` data-parallel ranks meet in the same
/// step.
pub fn interleaved(items: usize, ranks: usize, batch: usize) -> Vec<usize> {
    let share = items / ranks;
    let mut order = Vec::new();
    for start in (0..share).step_by(batch) {
        let end = (start + batch).min(share);
        order.extend((0..ranks).flat_map(|rank| rank * share + start..rank * share + end));
    }
    order
}

pub struct Setup {
    pub items: Vec<usize>,
    pub batch: usize,
    pub epochs: usize,
    pub accumulation: Option<usize>,
    pub order: Order,
    pub layers: usize,
    pub dropout: f64,
    /// Of the CPU's generator.
    pub seed: Option<u64>,
    /// Whether parameters are as Burn draws them, in the training.
    pub drawn_late: bool,
    /// Whether what goes into the head is normalized by batch.
    pub norm: bool,
    /// First blocks that are frozen, with the embedding.
    pub frozen: usize,
    /// Whether the encoder has an optimizer of its own, in a group by ids.
    pub groups: bool,
    pub trap: Trap,
    /// Of the optimizer.
    pub clipping: Option<GradientClippingConfig>,
    /// Keeps checkpoints, and resumes from that of an epoch.
    pub checkpoints: Option<Option<usize>>,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            items: (0..18).collect(),
            batch: 4,
            epochs: 2,
            accumulation: None,
            order: Order::default(),
            layers: 2,
            dropout: 0.0,
            seed: None,
            drawn_late: false,
            norm: false,
            frozen: 0,
            groups: false,
            trap: Trap::default(),
            clipping: None,
            checkpoints: None,
        }
    }
}

impl Setup {
    pub fn training(
        &self,
        directory: &Path,
        strategy: TrainingStrategy<Classifier>,
    ) -> (SupervisedTraining<Classifier>, Learner<Classifier>) {
        self.training_from(directory, strategy, 1.0)
    }

    /// With initial values of the output layer that are `factor` times as large.
    fn training_from(
        &self,
        directory: &Path,
        strategy: TrainingStrategy<Classifier>,
        factor: f64,
    ) -> (SupervisedTraining<Classifier>, Learner<Classifier>) {
        let train = loader(self.items.clone(), self.batch, self.order);
        let mut training = SupervisedTraining::new(directory, train, loader((0..10).collect(), 4, Order::default()))
            .metrics((LossMetric::new(), AccuracyMetric::new()))
            .metric_train_numeric(LearningRateMetric::new())
            .with_application_logger(None)
            .renderer(Box::new(CliMetricsRenderer::new()))
            .with_interrupter(self.trap.interrupter.0.clone())
            .num_epochs(self.epochs)
            .with_training_strategy(strategy);
        if let Some(accumulation) = self.accumulation {
            training = training.grads_accumulation(accumulation);
        }
        let mut model = Classifier::deep(self.layers, self.dropout, self.trap.clone());
        model.head.weight = model.head.weight.map(|weight| weight.mul_scalar(factor).detach().require_grad());
        model.norm = self.norm.then(|| BatchNormConfig::new(WIDTH).init(&cpu().autodiff()));
        model = if self.frozen > 0 { model.frozen(self.frozen) } else { model };
        if let Some(resume) = self.checkpoints {
            training = training.with_default_checkpointers();
            if let Some(epoch) = resume {
                training = training.checkpoint(epoch);
                // Other weights, so that only the checkpoint can bring back the right ones.
                model.head.weight = model.head.weight.map(|weight| weight.mul_scalar(0.5));
            }
        }
        (training, self.learner(model))
    }

    fn learner(&self, model: Classifier) -> Learner<Classifier> {
        let optimizer = AdamWConfig::new().with_weight_decay(0.1).with_grad_clipping(self.clipping.clone()).init();
        let of_encoder = || AdamWConfig::new().with_weight_decay(10.0).build();
        let optimizer =
            if self.groups { optimizer.with_group(model.ids_of_encoder(), of_encoder(), None) } else { optimizer };
        Learner::new(model, optimizer, 0.003)
    }

    pub fn run(&self, directory: &Path, strategy: TrainingStrategy<Classifier>) -> LearningResult<Classifier> {
        self.run_with(directory, strategy, 1.0)
    }

    /// With initial values of the output layer that are `factor` times as large.
    pub fn run_with(
        &self,
        directory: &Path,
        strategy: TrainingStrategy<Classifier>,
        factor: f64,
    ) -> LearningResult<Classifier> {
        let (training, learner) = self.training_from(directory, strategy, factor);
        let _generator = generator();
        self.seed.iter().for_each(|seed| cpu().seed(*seed));
        let not_drawn = || self.learner(Classifier::not_drawn(self.layers, self.dropout, self.trap.clone()));
        training.launch(if self.drawn_late { not_drawn() } else { learner })
    }

    /// [`run`](Self::run) of a training that fails, which takes less than `seconds`. Other tests are not waited for.
    pub fn fail_within(
        &self,
        seconds: u64,
        directory: &Path,
        strategy: TrainingStrategy<Classifier>,
    ) -> LearningResult<Classifier> {
        let (training, learner) = self.training_from(directory, strategy, 1.0);
        let _generator = generator();
        let begun = Instant::now();
        let result = training.launch(learner);
        assert!(begun.elapsed().as_secs() < seconds, "{:?}", result.error);
        result
    }

    /// The trained numbers.
    pub fn numbers(&self, strategy: TrainingStrategy<Classifier>) -> Vec<f64> {
        let result = self.run(tempfile::tempdir().unwrap().path(), strategy);
        assert!(result.error.is_none(), "{}", result.error.unwrap());
        assert!(result.interrupted.is_none(), "{:?}", result.interrupted);
        result.model.numbers()
    }
}

/// Relative to the norm.
pub fn difference(left: &[f64], right: &[f64]) -> f64 {
    assert_eq!(left.len(), right.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
    norm(&mut left.iter().zip(right).map(|(left, right)| left - right)) / norm(&mut right.iter().copied())
}
