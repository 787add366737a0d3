//! Data parallelism under `SupervisedTraining` against one device with the larger batch.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::module::{Module, Param};
use burn::optim::AdamWConfig;
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn::train::logger::{FileMetricLogger, MetricLogger};
use burn::train::metric::LossMetric;
use burn::train::metric::store::{Aggregate, Direction, Split};
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{
    ExecutionStrategy, InferenceStep, Interrupter, Learner, LearningResult, MetricEarlyStoppingStrategy,
    RegressionOutput, StoppingCondition, SupervisedTraining, TrainOutput, TrainStep, TrainingStrategy,
};

use super::MegatronStrategy;
use super::shares::whole_shares;

pub(super) const INPUTS: usize = 3;
const HIDDEN: usize = 8;

/// A perceptron in f64, so that rounding cannot hide a wrong gradient; it can be made to fail or to stop.
#[derive(Module, Debug)]
struct Net {
    hidden: Param<Tensor<2>>,
    output: Param<Tensor<2>>,
    #[module(skip)]
    trap: Trap,
}

#[derive(Clone, Debug, Default)]
struct Trap {
    steps: Arc<AtomicUsize>,
    panic_at: Option<usize>,
    stop_at: Option<usize>,
    interrupter: Handle,
}

#[derive(Clone, Default)]
struct Handle(Interrupter);

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Handle")
    }
}

#[derive(Clone, Debug)]
pub(super) struct Row {
    x: [f64; INPUTS],
    y: f64,
}

struct Rows(DType);

pub(super) type Batch = (Tensor<2>, Tensor<2>);

impl Batcher<Row, Batch> for Rows {
    fn batch(&self, rows: Vec<Row>, device: &Device) -> Batch {
        let count = rows.len();
        let x: Vec<f64> = rows.iter().flat_map(|row| row.x).collect();
        let y: Vec<f64> = rows.iter().map(|row| row.y).collect();
        let tensor = |values, width| Tensor::from_data(TensorData::new(values, [count, width]), (device, self.0));
        (tensor(x, INPUTS), tensor(y, 1))
    }
}

impl Net {
    fn new(trap: Trap, dtype: DType) -> Self {
        let device = Device::flex().autodiff();
        let weights = |rows: usize, columns: usize| {
            let values: Vec<f64> = (0..rows * columns).map(|i| ((i * 37 % 23) as f64 - 11.0) / 20.0).collect();
            Param::from_tensor(Tensor::from_data(TensorData::new(values, [rows, columns]), (&device, dtype)))
        };
        Self { hidden: weights(INPUTS, HIDDEN), output: weights(HIDDEN, 1), trap }
    }

    fn forward(&self, (x, y): Batch) -> RegressionOutput {
        let predicted = x.matmul(self.hidden.val()).tanh().matmul(self.output.val());
        let loss = (predicted.clone() - y.clone()).powi_scalar(2).mean();
        RegressionOutput::new(loss, predicted, y)
    }

    fn weights(&self) -> Vec<f64> {
        let read = |param: &Param<Tensor<2>>| param.val().into_data().iter::<f64>().collect::<Vec<_>>();
        [read(&self.hidden), read(&self.output)].concat()
    }
}

impl TrainStep for Net {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> TrainOutput<RegressionOutput> {
        let step = self.trap.steps.fetch_add(1, Ordering::SeqCst) + 1;
        assert!(self.trap.panic_at != Some(step), "the model ran into a wall");
        if self.trap.stop_at == Some(step) {
            self.trap.interrupter.0.stop(Some("enough"));
        }
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

pub(super) fn rows(count: usize) -> Vec<Row> {
    let wave = |i: usize, j: usize| ((i * (j + 3)) as f64 * 0.7).sin();
    (0..count)
        .map(|i| {
            let x = [wave(i, 0), wave(i, 1), wave(i, 2)];
            Row { x, y: x[0] * x[1] - 0.5 * x[2] }
        })
        .collect()
}

/// The order in which one device with the larger batch meets the rows that `ranks` ranks meet in the same step.
fn interleaved(rows: &[Row], ranks: usize, batch: usize) -> Vec<Row> {
    let share = rows.len() / ranks;
    let mut order = Vec::new();
    for start in (0..share).step_by(batch) {
        let end = (start + batch).min(share);
        order.extend((0..ranks).flat_map(|rank| rows[rank * share + start..rank * share + end].to_vec()));
    }
    order
}

pub(super) fn loader(rows: Vec<Row>, batch: usize, dtype: DType) -> Arc<dyn DataLoader<Batch>> {
    DataLoaderBuilder::new(Rows(dtype)).batch_size(batch).build(InMemDataset::new(rows))
}

struct Setup {
    rows: Vec<Row>,
    batch: usize,
    epochs: usize,
    accumulation: Option<usize>,
    strategy: TrainingStrategy<Net>,
    trap: Trap,
    dtype: DType,
}

impl Setup {
    /// Batches of 4 in double precision.
    fn new(rows: Vec<Row>, epochs: usize, strategy: TrainingStrategy<Net>, trap: Trap) -> Self {
        Self { rows, batch: 4, epochs, accumulation: None, strategy, trap, dtype: DType::F64 }
    }
}

fn training(directory: &Path, setup: Setup) -> (SupervisedTraining<Net>, Learner<Net>) {
    let valid = loader(rows(10), 4, setup.dtype);
    let mut training = SupervisedTraining::new(directory, loader(setup.rows, setup.batch, setup.dtype), valid)
        .metrics((LossMetric::new(),))
        .with_application_logger(None)
        .renderer(Box::new(CliMetricsRenderer::new()))
        .with_interrupter(setup.trap.interrupter.0.clone())
        .num_epochs(setup.epochs)
        .with_training_strategy(setup.strategy);
    if let Some(accumulation) = setup.accumulation {
        training = training.grads_accumulation(accumulation);
    }
    (training, Learner::new(Net::new(setup.trap, setup.dtype), AdamWConfig::new().with_weight_decay(0.1).init(), 0.01))
}

fn run(directory: &Path, setup: Setup) -> LearningResult<Net> {
    let (training, learner) = training(directory, setup);
    training.launch(learner)
}

fn losses(directory: &Path, epoch: usize, split: Split) -> Vec<f64> {
    let mut logger = FileMetricLogger::new(directory);
    let entries = logger.read_numeric("Loss", epoch, &split).unwrap();
    entries.iter().filter(|entry| !entry.serialize().ends_with("final")).map(|entry| entry.current()).collect()
}

fn one_device() -> TrainingStrategy<Net> {
    ExecutionStrategy::single(Device::flex()).into()
}

pub(super) fn worst(left: &[f64], right: &[f64]) -> f64 {
    assert_eq!(left.len(), right.len());
    left.iter().zip(right).map(|(left, right)| (left - right).abs() / right.abs().max(1e-3)).fold(0.0, f64::max)
}

#[test]
fn ranks_equal_one_device_with_the_larger_batch() {
    for (ranks, accumulation) in [(2, None), (3, None), (2, Some(2)), (4, Some(3))] {
        // 61 rows: a remainder that no rank sees, and a last batch that is not full.
        let (all, batch, epochs) = (rows(61), 4, 3);
        let (one, many) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let trap = Trap::default;
        let rows = interleaved(&all, ranks, batch);
        let single = Setup { batch: batch * ranks, accumulation, ..Setup::new(rows, epochs, one_device(), trap()) };
        let strategy = MegatronStrategy::data_parallel(ranks);
        let parallel = Setup { accumulation, ..Setup::new(all, epochs, strategy, trap()) };
        let single = run(one.path(), single).model.weights();
        let result = run(many.path(), parallel);
        assert!(result.error.is_none() && result.interrupted.is_none());
        let parallel = result.model.weights();
        assert!(worst(&single, &Net::new(trap(), DType::F64).weights()) > 1e-2, "the single device did not learn");
        assert!(worst(&parallel, &single) < 1e-10, "{ranks} ranks: {}", worst(&parallel, &single));

        for epoch in 1..=epochs {
            let single = losses(one.path(), epoch, Split::Train);
            let parallel: Vec<f64> = losses(many.path(), epoch, Split::Train)
                .chunks(ranks)
                .map(|step| step.iter().sum::<f64>() / ranks as f64)
                .collect();
            assert!(worst(&parallel, &single) < 1e-10, "{ranks} ranks, epoch {epoch}: {parallel:?} {single:?}");
        }
        let batches: usize = whole_shares(10, ranks).iter().map(|share| share.len().div_ceil(4)).sum();
        assert_eq!(losses(many.path(), 1, Split::Valid).len(), batches, "every rank validates its share of 10 rows");
    }
}

#[test]
fn a_rank_that_panics_ends_the_training_with_its_error() {
    let directory = tempfile::tempdir().unwrap();
    let trap = Trap { panic_at: Some(9), ..Trap::default() };
    let start = std::time::Instant::now();
    let result = run(directory.path(), Setup::new(rows(64), 2, MegatronStrategy::data_parallel(4), trap));
    let error = result.error.expect("the failure is the result's error").to_string();
    assert!(error.contains("the model ran into a wall") && error.contains("dp "), "{error}");
    assert!(result.interrupted.is_none());
    assert!(start.elapsed().as_secs() < 10);
}

#[test]
fn the_interrupter_stops_all_ranks_after_the_step() {
    let directory = tempfile::tempdir().unwrap();
    let trap = Trap { stop_at: Some(5), ..Trap::default() };
    let steps = trap.steps.clone();
    let result = run(directory.path(), Setup::new(rows(64), 5, MegatronStrategy::data_parallel(2), trap));
    assert_eq!(result.interrupted.unwrap().reason.as_deref(), Some("enough"));
    assert!(result.error.is_none());
    assert_eq!(steps.load(Ordering::SeqCst), 6, "step 3 of both ranks is the last");
}

#[test]
fn early_stopping_ends_all_ranks_in_the_same_epoch() {
    let directory = tempfile::tempdir().unwrap();
    let trap = Trap::default();
    let steps = trap.steps.clone();
    let setup = Setup::new(rows(16), 50, MegatronStrategy::data_parallel(2), trap);
    // A loss that falls counts as 'no improvement' when the highest is wanted: epoch 1 stays the best.
    let never_better = MetricEarlyStoppingStrategy::new(
        &LossMetric::new(),
        Aggregate::Mean,
        Direction::Highest,
        Split::Train,
        StoppingCondition::NoImprovementSince { n_epochs: 3 },
    );
    let (training, learner) = training(directory.path(), setup);
    training.early_stopping(never_better).launch(learner);
    let epochs_run = steps.load(Ordering::SeqCst) / (2 * 2);
    assert!((4..10).contains(&epochs_run), "{epochs_run} epochs");
}

#[test]
fn checkpoints_resume_to_the_same_weights() {
    let (whole, parts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let start = |directory: &Path, epochs: usize, resume: Option<usize>| {
        let strategy = MegatronStrategy::data_parallel(2);
        // burn-train restores the optimizer's state in f32.
        let setup = Setup { dtype: DType::F32, ..Setup::new(rows(16), epochs, strategy, Trap::default()) };
        let (mut training, mut learner) = training(directory, setup);
        training = training.with_default_checkpointers();
        if let Some(epoch) = resume {
            training = training.checkpoint(epoch);
            // Other weights, so that only the checkpoint can bring back the right ones.
            let mut model = learner.model();
            model.hidden = model.hidden.map(|tensor| tensor.mul_scalar(0.5));
            learner = Learner::new(model, AdamWConfig::new().with_weight_decay(0.1).init(), 0.01);
        }
        training.launch(learner).model.weights()
    };
    let uninterrupted = start(whole.path(), 4, None);
    start(parts.path(), 2, None);
    let resumed = start(parts.path(), 4, Some(2));
    assert_eq!(resumed, uninterrupted);
}
