//! Trainings under burn-train: what models do in `optimize`, and metrics that keep tensors from batch to batch.

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::prelude::*;
use burn::tensor::FloatDType;
use burn::train::metric::{ClassReduction, LossMetric, RecallMetric};
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{
    ClassificationOutput, ExecutionStrategy, InferenceStep, Learner, LearnerModel, LearningResult, SupervisedTraining,
    TrainOutput, TrainStep, TrainingStrategy,
};
use burn_megatron::prelude::*;

use crate::{classes, numbers};

type Batch = (Tensor<2>, Tensor<1, Int>);

struct Numbered;

impl Batcher<usize, Batch> for Numbered {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Batch {
        let items = items[0]..items[0] + items.len();
        (numbers(&items, [items.len(), 3], 0, device), classes(&items, [items.len()], 4, device))
    }
}

/// A student and its teacher, a moving average of it, which the step of the optimizer moves on.
#[derive(Module, Debug)]
struct Student {
    student: Linear,
    teacher: Linear,
}

impl Student {
    fn new(device: &Device) -> Self {
        let student = LinearConfig::new(3, 4).with_bias(false).init(device);
        // Drawn: clones of what is not share whether it is trained.
        student.weight.val();
        Self { teacher: student.clone().no_grad(), student }
    }

    fn classify(&self, (x, classes): Batch) -> ClassificationOutput {
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

macro_rules! classifier {
    ($(#[$doc:meta])* $name:ident, $output:ty, $made:expr) => {
        $(#[$doc])*
        #[derive(Module, Debug)]
        struct $name {
            student: Student,
        }

        impl TrainStep for $name {
            type Input = Batch;
            type Output = $output;

            fn step(&self, batch: Batch) -> TrainOutput<Self::Output> {
                let output = self.student.classify(batch);
                TrainOutput::new(self, output.loss.backward(), $made(output))
            }
        }

        impl InferenceStep for $name {
            type Input = Batch;
            type Output = $output;

            fn step(&self, batch: Batch) -> Self::Output {
                $made(self.student.classify(batch))
            }
        }
    };
}

classifier!(
    /// The student without a step of its own.
    Bare, ClassificationOutput, std::convert::identity
);
classifier!(
    /// With outputs in host memory.
    Counted, OnHost<ClassificationOutput>, OnHost
);

fn model() -> Student {
    let mut device = Device::flex();
    let _ = device.configure(FloatDType::F64);
    let device = device.autodiff();
    device.seed(3);
    Student::new(&device)
}

fn trained<M>(
    model: M,
    batch: usize,
    strategy: TrainingStrategy<M>,
    metrics: impl Fn(SupervisedTraining<M>) -> SupervisedTraining<M>,
) -> LearningResult<M>
where
    M: LearnerModel + TrainStep<Input = Batch> + InferenceStep<Input = Batch>,
{
    let directory = tempfile::tempdir().unwrap();
    let loader = || DataLoaderBuilder::new(Numbered).batch_size(batch).build(InMemDataset::new((0..16).collect()));
    let training = SupervisedTraining::new(directory.path(), loader(), loader())
        .with_application_logger(None)
        .renderer(Box::new(CliMetricsRenderer::new()))
        .num_epochs(2)
        .with_training_strategy(strategy);
    metrics(training).launch(Learner::new(model, SgdConfig::new().init(), 0.5))
}

fn mesh(layout: &str) -> MeshStrategy {
    MegatronStrategy::mesh(layout.parse().unwrap())
        .plan(Plan::default().columns("student"))
        .units(Units::auto().keep_below(2))
}

fn error<M: LearnerModel>(result: LearningResult<M>) -> String {
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
    for strategy in [mesh("DP2"), mesh("DP2").overlap_grad_reduce()] {
        let result = run(8, strategy.into());
        assert!(result.error.is_none(), "{:?}", result.error);
        let tolerance = burn::tensor::Tolerance::absolute(1e-12);
        let [here, there] = weights(result.model);
        here.assert_approx_eq::<f64>(&student, tolerance);
        there.assert_approx_eq::<f64>(&teacher, tolerance);
    }
    for layout in ["DP2 ZeRO1", "DP2 ZeRO2", "DP2 ZeRO3"] {
        let text = error(run(8, mesh(layout).into()));
        assert!(text.contains("`TrainStep::optimize` changes `teacher.weight`, which is frozen"), "{layout}: {text}");
    }
    let text = error(run(16, mesh("TP2").into()));
    assert!(text.contains("may use frozen parameters only without tensor parallelism"), "{text}");
}

/// On devices of their own, which are added up in host memory.
#[test]
fn metrics_that_add_up_the_outputs_of_several_ranks() {
    let recall = || RecallMetric::multiclass(1, ClassReduction::Macro);
    let strategy = || mesh("TP2 DP2");
    let counted = Counted { student: model() };
    let result = trained(counted, 8, strategy().into(), |training| training.metrics((recall(),)));
    assert!(result.error.is_none(), "{:?}", result.error);
    let bare = Bare { student: model() };
    let text = error(trained(bare, 8, strategy().into(), |training| training.metrics((recall(),))));
    assert!(text.contains("make outputs `OnHost`"), "{text}");
}
