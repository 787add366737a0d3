//! What a model keeps besides its weights: a count of its steps and a mask, which the step of the optimizer changes, a running
//! mean of one's own, and weights that are clipped.

use std::path::Path;

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Param, ParamId, RunningState};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::prelude::*;
use burn::tensor::FloatDType;
use burn::train::metric::LossMetric;
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{
    ExecutionStrategy, InferenceStep, Learner, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep,
    TrainingStrategy,
};
use burn_megatron::prelude::*;

use crate::numbers;
use crate::values::{All, Known};

const WIDTH: usize = 8;

#[derive(Module, Debug)]
struct Annealed {
    blocks: Vec<Linear>,
    head: Linear,
    steps: Param<Tensor<1, Int>>,
    /// Features that are used so far.
    used: Param<Tensor<1, Bool>>,
    center: RunningState<Tensor<1>>,
    /// Whether steps are counted by what the weights say.
    #[module(skip)]
    by_weights: bool,
    /// Counts steps too, as a plain field, if there are any to begin with.
    plain: usize,
}

#[derive(Module, Debug)]
struct Batch {
    x: Tensor<2>,
    y: Tensor<2>,
}

impl Annealed {
    fn new() -> Self {
        let mut device = Device::flex();
        let _ = device.configure(FloatDType::F64);
        let device = device.autodiff();
        let model = Self {
            blocks: (0..2).map(|_| LinearConfig::new(WIDTH, WIDTH).init(&device)).collect(),
            head: LinearConfig::new(WIDTH, 2).init(&device),
            steps: Param::initialized(ParamId::new(), Tensor::from_data([0], &device)),
            used: Param::initialized(ParamId::new(), Tensor::from_data([false; WIDTH], &device)),
            center: RunningState::new(Tensor::zeros([WIDTH], &device)),
            by_weights: false,
            plain: 0,
        };
        model.map(&mut Known::default())
    }
}

impl Stages for Annealed {
    type Activation = Tensor<2>;

    fn blocks(&self) -> usize {
        self.blocks.len()
    }

    fn owner(&self, path: &str) -> Option<Part> {
        Part::by_path(path, "center|steps|used", "blocks", "head")
    }

    fn first(&self, batch: &Batch) -> Tensor<2> {
        let x = batch.x.clone();
        let center = self.center.value_sync();
        if x.device().is_autodiff() {
            let mean: Tensor<1> = x.clone().mean_dim(0).squeeze_dim(0);
            self.center.update((center.clone() * 0.9 + mean * 0.1).detach());
        }
        let n = x.dims()[0];
        let is_off = self.used.val().bool_not().unsqueeze::<2>().repeat_dim(0, n);
        (x - center.unsqueeze()).mask_fill(is_off, 0.25)
    }

    fn block(&self, index: usize, x: Tensor<2>, _: &Batch) -> Tensor<2> {
        // The temperature falls from step to step.
        let temperature = (self.steps.val().float() * 0.2 + 1.0).unsqueeze::<2>();
        x.clone() + (self.blocks[index].forward(x) * temperature).tanh()
    }

    fn last(&self, x: Tensor<2>, batch: &Batch) -> (Tensor<1>, RegressionOutput) {
        let y = self.head.forward(x);
        let loss = (y.clone() - batch.y.clone()).powi_scalar(2).mean();
        (loss.clone(), RegressionOutput::new(loss, y, batch.y.clone()))
    }
}

impl TrainStep for Annealed {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> TrainOutput<RegressionOutput> {
        let (loss, output) = self.run(&batch);
        TrainOutput::new(self, loss.backward(), output)
    }

    fn optimize(self, optimizer: &mut ModuleOptimizer, rate: ModuleLearningRate, grads: GradientsParams) -> Self {
        let mut model = optimizer.step(rate, self, grads);
        let of_weights = model.head.weight.val().sum().into_scalar::<f64>() * 1e9;
        let more = if model.by_weights { of_weights as i64 } else { 1 };
        model.steps = model.steps.map(|steps| steps + more);
        model.plain += model.plain.min(1);
        let at = model.steps.val().into_scalar::<i64>() as usize % WIDTH;
        model.used = model.used.map(|used| {
            let here = Tensor::<1, Int>::arange(0..WIDTH as i64, &used.device()).equal_scalar(at as i64);
            used.bool_or(here)
        });
        model.head.weight = model.head.weight.map(|weight| weight.clamp(-0.3, 0.3).detach().require_grad());
        model
    }
}

impl InferenceStep for Annealed {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> RegressionOutput {
        self.run(&batch).1
    }
}

struct Numbered;

impl Batcher<usize, Batch> for Numbered {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Batch {
        let items = items[0]..items[0] + items.len();
        Batch {
            x: numbers(&items, [items.len(), WIDTH], 0, device) + 0.5,
            y: numbers(&items, [items.len(), 2], 1, device),
        }
    }
}

/// Everything of the model after so many epochs of one step each, or why there is nothing. `resume` says that a checkpoint of half
/// of them is there.
fn train(
    model: Annealed,
    directory: &Path,
    (batch, epochs, resume): (usize, usize, bool),
    strategy: TrainingStrategy<Annealed>,
) -> Result<Vec<f64>, String> {
    let loader = || DataLoaderBuilder::new(Numbered).batch_size(batch).build(InMemDataset::new((0..16).collect()));
    let mut training = SupervisedTraining::new(directory, loader(), loader())
        .with_application_logger(None)
        .renderer(Box::new(CliMetricsRenderer::new()))
        .metrics((LossMetric::new(),))
        .num_epochs(epochs)
        .with_default_checkpointers()
        .with_training_strategy(strategy);
    if resume {
        training = training.checkpoint(epochs / 2);
    }
    let result = training.launch(Learner::new(model, AdamWConfig::new().init(), 0.01));
    result.error.map_or(Ok(()), |error| Err(error.to_string()))?;
    let mut all = All::default();
    result.model.visit(&mut all);
    Ok(all.0)
}

fn mesh(layout: &str) -> MeshStrategy {
    let plan = Plan::default().columns("blocks.0").rows("blocks.1.weight");
    MegatronStrategy::mesh(layout.parse().unwrap()).plan(plan).units(Units::auto().keep_below(2))
}

#[test]
fn counts_and_masks_that_the_step_of_the_optimizer_changes() {
    let trained =
        |folder: &tempfile::TempDir, of, strategy| train(Annealed::new(), folder.path(), of, strategy).unwrap();
    let folder = tempfile::tempdir().unwrap();
    // A step has all items.
    let one = trained(&folder, (16, 6, false), ExecutionStrategy::single(Device::flex()).into());
    let compare = |layout: &str, strategy: &dyn Fn() -> TrainingStrategy<Annealed>| {
        let batch = 16 / layout.parse::<ParallelLayout>().unwrap().dp;
        for resume in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            if resume {
                trained(&folder, (batch, 3, false), strategy());
            }
            let found = trained(&folder, (batch, 6, resume), strategy());
            let worst = one.iter().zip(&found).map(|(one, found)| (one - found).abs()).fold(0.0, f64::max);
            assert!(worst < 1e-9 && found.len() == one.len(), "{layout}, resumed {resume}: {worst}");
        }
    };
    for layout in ["TP2", "DP2", "DP2 ZeRO1", "DP2 ZeRO2", "DP2 ZeRO3", "TP2 DP2 ZeRO1"] {
        compare(layout, &|| mesh(layout).into());
    }
    compare("DP2", &|| mesh("DP2").overlap_grad_reduce().into());
    let checkpointed = || vec![Device::flex().autodiff().gradient_checkpointing(); 2];
    for layout in ["TP2", "DP2", "DP2 ZeRO1"] {
        compare(layout, &|| mesh(layout).seeded().devices(checkpointed()).into());
    }
    for layout in ["TP1", "PP2", "PP2 DP2", "PP2 DP2 ZeRO1"] {
        compare(layout, &|| mesh(layout).stages().into());
    }
}

#[test]
fn counts_that_follow_from_weights_are_refused_where_a_rank_does_not_have_all() {
    let folder = tempfile::tempdir().unwrap();
    let model = Annealed { by_weights: true, ..Annealed::new() };
    let error = train(model, folder.path(), (8, 2, false), mesh("DP2 ZeRO1").into()).unwrap_err();
    assert!(error.contains("changes integers or booleans of the model, and on each rank to other values"), "{error}");
}

#[test]
fn plain_fields_that_change_are_refused_where_the_forward_pass_would_not_see_it() {
    let error = |strategy: TrainingStrategy<Annealed>| {
        let (folder, model) = (tempfile::tempdir().unwrap(), Annealed { plain: 1, ..Annealed::new() });
        train(model, folder.path(), (8, 2, false), strategy).err()
    };
    assert_eq!(error(ExecutionStrategy::single(Device::flex()).into()), None);
    let meshes = ["TP2", "DP2 ZeRO1"].map(|layout| mesh(layout).into());
    for strategy in meshes.into_iter().chain([mesh("PP2").stages().into()]) {
        let text = error(strategy).expect("it is refused");
        assert!(text.contains("changes plain fields of the model, from `plain: 1` to `plain: 2`"), "{text}");
    }
}
