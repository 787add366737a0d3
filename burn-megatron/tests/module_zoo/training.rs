//! Trainings under burn-train: what models do in `optimize`, and what of the data ranks read.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::{Dataset, DatasetError, InMemDataset};
use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::prelude::*;
use burn::tensor::FloatDType;
use burn::train::metric::LossMetric;
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{
    ClassificationOutput, ExecutionStrategy, InferenceStep, Learner, LearnerModel, LearningResult, SupervisedTraining,
    TrainOutput, TrainStep, TrainingStrategy,
};
use burn_megatron::prelude::*;
use parking_lot::Mutex;

use crate::metrics::Bare;
use crate::{classes, numbers};

pub type Batch = (Tensor<2>, Tensor<1, Int>);

struct Numbered;

impl Batcher<usize, Batch> for Numbered {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Batch {
        let items = items[0]..items[0] + items.len();
        (numbers(&items, [items.len(), 3], 0, device), classes(&items, [items.len()], 4, device))
    }
}

/// A student and its teacher, a moving average of it, which the step of the optimizer moves on.
#[derive(Module, Debug)]
pub struct Student {
    pub student: Linear,
    pub teacher: Linear,
}

impl Student {
    fn new(device: &Device) -> Self {
        let student = LinearConfig::new(3, 4).with_bias(false).init(device);
        // Drawn: clones of what is not share whether it is trained.
        student.weight.val();
        Self { teacher: student.clone().no_grad(), student }
    }

    pub fn classify(&self, (x, classes): Batch) -> ClassificationOutput {
        let y = self.student.forward(x.clone()) + self.teacher.forward(x).tanh();
        let loss = CrossEntropyLossConfig::new().init(&y.device()).forward(y.clone(), classes.clone());
        ClassificationOutput::new(loss, y, classes)
    }
}

impl TrainStep for Student {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> TrainOutput<ClassificationOutput> {
        let output = self.classify(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }

    fn optimize(self, optimizer: &mut ModuleOptimizer, rate: ModuleLearningRate, grads: GradientsParams) -> Self {
        let mut model = optimizer.step(rate, self, grads);
        let student = model.student.weight.val().inner();
        model.teacher.weight = model.teacher.weight.map(|old| Tensor::from_inner(old.inner() * 0.9 + student * 0.1));
        model
    }
}

impl InferenceStep for Student {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> ClassificationOutput {
        self.classify(batch)
    }
}

pub fn model() -> Student {
    let mut device = Device::flex();
    let _ = device.configure(FloatDType::F64);
    let device = device.autodiff();
    device.seed(3);
    Student::new(&device)
}

/// A model of these batches.
pub trait Classifies: LearnerModel + TrainStep<Input = Batch> + InferenceStep<Input = Batch> {}

impl<M: LearnerModel + TrainStep<Input = Batch> + InferenceStep<Input = Batch>> Classifies for M {}

pub fn trained<M: Classifies>(
    model: M,
    batch: usize,
    strategy: TrainingStrategy<M>,
    metrics: impl Fn(SupervisedTraining<M>) -> SupervisedTraining<M>,
) -> LearningResult<M> {
    trained_in(tempfile::tempdir().unwrap().path(), model, batch, strategy, metrics)
}

pub fn trained_in<M: Classifies>(
    directory: &Path,
    model: M,
    batch: usize,
    strategy: TrainingStrategy<M>,
    metrics: impl Fn(SupervisedTraining<M>) -> SupervisedTraining<M>,
) -> LearningResult<M> {
    let loader = || DataLoaderBuilder::new(Numbered).batch_size(batch).build(InMemDataset::new((0..16).collect()));
    let training = SupervisedTraining::new(directory, loader(), loader())
        .with_application_logger(None)
        .renderer(Box::new(CliMetricsRenderer::new()))
        .num_epochs(2)
        .with_training_strategy(strategy);
    metrics(training).launch(Learner::new(model, SgdConfig::new().init(), 0.5))
}

pub fn mesh(layout: &str) -> MeshStrategy {
    MegatronStrategy::mesh(layout.parse().unwrap())
        .plan(Plan::default().columns("student"))
        .units(Units::auto().keep_below(2))
}

pub fn error<M: LearnerModel>(result: LearningResult<M>) -> String {
    result.error.expect("the training fails").to_string()
}

#[test]
fn a_moving_average_that_the_step_of_the_optimizer_moves_on() {
    let start = model();
    // A step has all items, in any order.
    let run =
        |batch, strategy| trained(start.clone(), batch, strategy, |training| training.metrics((LossMetric::new(),)));
    let weights = |model: Student| [model.student.weight, model.teacher.weight].map(|weight| weight.val().into_data());
    let [student, teacher] = weights(run(16, ExecutionStrategy::single(Device::flex()).into()).model);
    assert_ne!(teacher, weights(start.clone())[1]);
    for (batch, strategy) in [
        (8, mesh("DP2")),
        (8, mesh("DP2").overlap_grad_reduce()),
        (8, mesh("DP2").seeded()),
        (16, mesh("TP1").seeded()),
    ] {
        let result = run(batch, strategy.into());
        assert!(result.error.is_none(), "{:?}", result.error);
        let tolerance = burn::tensor::Tolerance::absolute(1e-12);
        let [here, there] = weights(result.model);
        here.assert_approx_eq::<f64>(&student, tolerance);
        there.assert_approx_eq::<f64>(&teacher, tolerance);
    }
    let folder = tempfile::tempdir().unwrap();
    for epochs in 1..=2 {
        // The second one resumes from the checkpoint of the first.
        let result = trained_in(folder.path(), start.clone(), 8, mesh("DP2").seeded().into(), |training| {
            let training = training.metrics((LossMetric::new(),)).with_default_checkpointers().num_epochs(epochs);
            if epochs == 2 { training.checkpoint(1) } else { training }
        });
        let of = |data: &TensorData| data.iter::<f64>().collect::<Vec<_>>();
        let gap = |found: &TensorData, one: &TensorData| {
            of(found).iter().zip(of(one)).map(|(found, one)| (found - one).abs()).fold(0.0, f64::max)
        };
        let [here, there] = weights(result.model);
        let worst = gap(&here, &student).max(gap(&there, &teacher));
        assert_eq!(epochs == 2, worst < 1e-12, "{epochs} epochs: {worst}");
    }
    for layout in ["DP2 ZeRO1", "DP2 ZeRO2", "DP2 ZeRO3"] {
        let text = error(run(8, mesh(layout).into()));
        assert!(text.contains("`TrainStep::optimize` changes `teacher.weight`, which is frozen"), "{layout}: {text}");
    }
    let text = error(run(16, mesh("TP2").into()));
    assert!(text.contains("may use frozen parameters only without tensor parallelism"), "{text}");
}

/// A data set that counts what is read.
struct Counting(Arc<Mutex<BTreeMap<usize, usize>>>);

impl Dataset<usize> for Counting {
    fn get(&self, index: usize) -> Result<usize, DatasetError> {
        *self.0.lock().entry(index).or_default() += 1;
        Ok(index)
    }

    fn len(&self) -> usize {
        16
    }
}

/// Every rank reads its share of a batch, and tensor-parallel ranks read together.
#[test]
fn every_item_is_read_once_an_epoch_for_all_ranks() {
    for layout in ["DP2", "DP4 ZeRO1", "DP2 ZeRO3", "TP2 DP2", "TP2"] {
        let reads = Arc::new(Mutex::new(BTreeMap::new()));
        let loader = || DataLoaderBuilder::new(Numbered).batch_size(4).build(InMemDataset::new((0..16).collect()));
        let directory = tempfile::tempdir().unwrap();
        let counted = DataLoaderBuilder::new(Numbered).batch_size(4).build(Counting(reads.clone()));
        let training = SupervisedTraining::new(directory.path(), counted, loader())
            .with_application_logger(None)
            .renderer(Box::new(CliMetricsRenderer::new()))
            .num_epochs(2)
            .with_training_strategy(mesh(layout).into());
        let result = training.launch(Learner::new(Bare { student: model() }, SgdConfig::new().init(), 0.5));
        assert!(result.error.is_none(), "{:?}", result.error);
        assert_eq!(*reads.lock(), (0..16).map(|item| (item, 2)).collect(), "{layout}");
    }
}
