//! A classifier of texts as Burn's users build it, its data, and a training.

use parking_lot::{Mutex, MutexGuard};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::grad_clipping::GradientClippingConfig;
use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{ModuleMapper, ModuleVisitor, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::prelude::*;
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{
    ClassificationOutput, InferenceStep, Interrupter, Learner, LearningResult, SupervisedTraining, TrainOutput,
    TrainStep, TrainingStrategy,
};

use burn_megatron::prelude::{Part, Sendable, Stages};

use crate::clip_grad_norm::clip_grad_norm;
use crate::cpu;
use crate::passes::Passes;

pub const WIDTH: usize = 16;
const LENGTH: usize = 6;
const VOCABULARY: usize = 24;
const CLASSES: usize = 4;

#[derive(Module, Debug)]
pub struct Classifier {
    tokens: Embedding,
    encoder: TransformerEncoder,
    head: Linear,
    #[module(skip)]
    pub trap: Trap,
}

/// Fails or stops at a step of all ranks.
#[derive(Clone, Debug, Default)]
pub struct Trap {
    pub steps: Arc<AtomicUsize>,
    pub panic_at: Option<usize>,
    pub stop_at: Option<usize>,
    /// Clips the gradients of one device.
    pub max_grad_norm: Option<f64>,
    /// Ends the process, as if it had been killed.
    pub exit_at: Option<usize>,
    pub interrupter: Handle,
    /// Sees the backward passes of ranks of one device.
    pub passes: Option<Passes>,
}

#[derive(Clone, Default)]
pub struct Handle(pub Interrupter);

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Handle")
    }
}

impl Classifier {
    /// With two layers.
    pub fn new(dropout: f64, trap: Trap) -> Self {
        Self::deep(2, dropout, trap)
    }

    pub fn deep(layers: usize, dropout: f64, trap: Trap) -> Self {
        let _generator = generator();
        let device = &cpu().autodiff();
        let encoder = TransformerEncoderConfig::new(WIDTH, 32, 4, layers).with_norm_first(true).with_dropout(dropout);
        let model = Self {
            tokens: EmbeddingConfig::new(VOCABULARY, WIDTH).init(device),
            encoder: encoder.init(device),
            head: LinearConfig::new(WIDTH, CLASSES).init(device),
            trap,
        };
        model.map(&mut Known::default())
    }

    /// Before every training step.
    fn spring(trap: &Trap) {
        let step = trap.steps.fetch_add(1, Ordering::SeqCst) + 1;
        assert!(trap.panic_at != Some(step), "the model ran into a wall");
        if trap.exit_at == Some(step) {
            std::process::abort();
        }
        if trap.stop_at == Some(step) {
            trap.interrupter.0.stop(Some("enough"));
        }
    }

    /// Every number of the record.
    pub fn numbers(&self) -> Vec<f64> {
        let mut all = All::default();
        self.visit(&mut all);
        all.0
    }
}

/// Gives parameters values that do not depend on a generator.
#[derive(Default)]
pub struct Known {
    index: usize,
    fields: Vec<String>,
}

impl ModuleMapper for Known {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.fields.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.fields.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !param.is_require_grad() {
            return param;
        }
        self.index += 1;
        let index = self.index;
        let one = if self.fields.last().is_some_and(|name| name == "gamma") { 1.0 } else { 0.0 };
        param.map(|old| {
            let value = |i: usize| one + ((i * 7 + index * 5) as f64 * 0.9).sin() / 4.0;
            let values = (0..old.shape().num_elements()).map(value).collect::<Vec<f64>>();
            Tensor::from_data(TensorData::new(values, old.dims()), &old.device()).require_grad()
        })
    }
}

/// Every number of a module.
#[derive(Default)]
pub struct All(pub Vec<f64>);

impl ModuleVisitor for All {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.extend(param.val().into_data().iter::<f64>());
    }
}

impl TrainStep for Classifier {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> TrainOutput<ClassificationOutput> {
        let (loss, output) = self.run(&batch);
        TrainOutput::new(self, loss.backward(), output)
    }

    fn optimize(self, optimizer: &mut ModuleOptimizer, rate: ModuleLearningRate, grads: GradientsParams) -> Self {
        let grads = if let Some(norm) = self.trap.max_grad_norm { clip_grad_norm(&self, grads, norm) } else { grads };
        optimizer.step(rate, self, grads)
    }
}

impl Stages for Classifier {
    type Activation = Tensor<3>;

    fn blocks(&self) -> usize {
        self.encoder.layers.len()
    }

    fn owner(&self, path: &str) -> Option<Part> {
        Part::by_path(path, "tokens", "encoder.layers", "head")
    }

    fn first(&self, batch: &Batch) -> Tensor<3> {
        self.tokens.forward(batch.tokens.clone())
    }

    fn block(&self, index: usize, x: Tensor<3>, batch: &Batch) -> Tensor<3> {
        self.encoder.layers[index].forward(x, Some(batch.padding.clone()), None)
    }

    fn last(&self, x: Tensor<3>, batch: &Batch) -> (Tensor<1>, ClassificationOutput) {
        let is_training = x.device().is_autodiff();
        if is_training {
            Self::spring(&self.trap);
        }
        let passes = self.trap.passes.as_ref().filter(|_| is_training);
        let [count, _, _] = x.dims();
        let x = x.slice([0..count, 0..1]).reshape([count, WIDTH]);
        let output = self.head.forward(passes.map_or(x.clone(), |passes| passes.past_head(x)));
        let classes = batch.classes.clone();
        let loss = CrossEntropyLossConfig::new().init(&output.device()).forward(output.clone(), classes.clone());
        let loss = passes.map_or(loss.clone(), |passes| passes.begin(loss));
        (loss.clone(), ClassificationOutput::new(loss, output, classes))
    }
}

impl InferenceStep for Classifier {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> ClassificationOutput {
        self.run(&batch).1
    }
}

#[derive(Module, Debug)]
pub struct Batch {
    tokens: Tensor<2, Int>,
    padding: Tensor<2, Bool>,
    classes: Tensor<1, Int>,
}

impl Sendable for Batch {
    type Host = (TensorData, (TensorData, TensorData));

    fn to_host(self) -> Self::Host {
        (self.tokens, (self.padding, self.classes)).to_host()
    }

    fn from_host(host: Self::Host, device: &Device) -> Self {
        let (tokens, (padding, classes)) = Sendable::from_host(host, device);
        Self { tokens, padding, classes }
    }
}

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
        if let Some(resume) = self.checkpoints {
            training = training.with_default_checkpointers();
            if let Some(epoch) = resume {
                training = training.checkpoint(epoch);
                // Other weights, so that only the checkpoint can bring back the right ones.
                model.head.weight = model.head.weight.map(|weight| weight.mul_scalar(0.5));
            }
        }
        let optimizer = AdamWConfig::new().with_weight_decay(0.1).with_grad_clipping(self.clipping.clone());
        (training, Learner::new(model, optimizer.init(), 0.003))
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
        training.launch(learner)
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

/// The process has one generator, from which new models and trainings draw: one at a time.
pub fn generator() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock()
}

/// Relative to the norm.
pub fn difference(left: &[f64], right: &[f64]) -> f64 {
    assert_eq!(left.len(), right.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
    norm(&mut left.iter().zip(right).map(|(left, right)| left - right)) / norm(&mut right.iter().copied())
}
