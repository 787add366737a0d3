//! Batch normalization over all data-parallel ranks in a pipeline.

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::prelude::*;
use burn::train::{ExecutionStrategy, Learner, RegressionOutput, TrainingStrategy};
use burn_megatron::prelude::*;

use crate::classifier::generator;
use crate::cpu;
use crate::runs::{trained, training};
use crate::setup::{difference, interleaved};
use crate::values::{All, Known};

const WIDTH: usize = 4;
const BATCH: usize = 4;

#[derive(Module, Debug)]
struct Layer {
    linear: Linear,
    norm: BatchNorm,
}

#[derive(Module, Debug)]
struct Tower {
    input: BatchNorm,
    layers: Vec<Layer>,
    output: Linear,
}

#[derive(Module, Debug)]
struct Batch {
    x: Tensor<2>,
    y: Tensor<2>,
}

impl Tower {
    fn new() -> Self {
        let device = &cpu().autodiff();
        let norm = || BatchNormConfig::new(WIDTH).init(device);
        let layer = |_| Layer { linear: LinearConfig::new(WIDTH, WIDTH).init(device), norm: norm() };
        let output = LinearConfig::new(WIDTH, 1).init(device);
        Self { input: norm(), layers: (0..4).map(layer).collect(), output }.map(&mut Known::default())
    }
}

impl Stages for Tower {
    type Activation = Tensor<2>;

    fn blocks(&self) -> usize {
        self.layers.len()
    }

    fn owner(&self, path: &str) -> Option<Part> {
        Part::by_path(path, "input", "layers", "output")
    }

    fn first(&self, batch: &Batch) -> Tensor<2> {
        self.input.forward(batch.x.clone())
    }

    fn block(&self, index: usize, x: Tensor<2>, _: &Batch) -> Tensor<2> {
        let Layer { linear, norm } = &self.layers[index];
        x.clone() + norm.forward(linear.forward(x)).tanh()
    }

    fn last(&self, x: Tensor<2>, batch: &Batch) -> (Tensor<1>, RegressionOutput) {
        let y = self.output.forward(x);
        let loss = (y.clone() - batch.y.clone()).powi_scalar(2).mean();
        (loss.clone(), RegressionOutput::new(loss, y, batch.y.clone()))
    }
}

burn_megatron::steps_of_stages!(Tower, Batch, RegressionOutput);

struct Numbered;

impl Batcher<usize, Batch> for Numbered {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Batch {
        let number =
            |item: usize, at: usize| ((item * 31 + at * (item % 5 + 1)) as f64 * 0.37).sin() + item as f64 / 40.0;
        let x: Vec<f64> = items.iter().flat_map(|&item| (0..WIDTH).map(move |at| number(item, at))).collect();
        let y: Vec<f64> = items.iter().map(|item| (*item as f64 * 0.6).cos()).collect();
        let tensor = |values, width| Tensor::from_data(TensorData::new(values, [items.len(), width]), device);
        Batch { x: tensor(x, WIDTH), y: tensor(y, 1) }
    }
}

fn numbers(items: Vec<usize>, batch: usize, accumulation: usize, strategy: TrainingStrategy<Tower>) -> Vec<f64> {
    let _generator = generator();
    let loader = |items| DataLoaderBuilder::new(Numbered).batch_size(batch).build(InMemDataset::new(items));
    let directory = tempfile::tempdir().unwrap();
    // Not Adam, which makes steps of the rounding error that is the gradient of a bias before a normalization.
    let learner = Learner::new(Tower::new(), SgdConfig::new().init(), 0.1);
    let training = training(directory.path(), [loader(items), loader((0..10).collect())], 3, None, strategy);
    let mut all = All::default();
    trained(training.grads_accumulation(accumulation).launch(learner)).visit(&mut all);
    all.0
}

#[test]
fn synchronized_statistics_of_micro_batches_are_those_of_one_device() {
    let layouts = ["PP2 DP2", "PP2 VPP2 DP2", "PP4 DP2", "PP2 DP2 ZeRO1", "PP2 DP2 ZeRO2", "PP2 DP2 ZeRO3", "DP2"];
    let alone = numbers(interleaved(64, 2, BATCH), 2 * BATCH, 4, ExecutionStrategy::single(cpu()).into());
    for layout in layouts {
        let layout: ParallelLayout = layout.parse().unwrap();
        let mesh = || MegatronStrategy::mesh(layout.clone()).units(Units::auto().keep_below(2)).micro_batches(4);
        let run = |mesh: MeshStrategy| numbers((0..64).collect(), BATCH, 4, mesh.stages().into());
        let gap = difference(&run(mesh().sync_batch_norm()), &alone);
        assert!(gap < 1e-10, "{layout}: {gap}");
        if layout.zero < 3 {
            let gap = difference(&run(mesh().sync_batch_norm().overlap_grad_reduce().bucket_size(64)), &alone);
            assert!(gap < 1e-10, "{layout}, gradients reduced during the backward pass: {gap}");
        }
        assert!(difference(&run(mesh()), &alone) > 1e-6, "{layout}: there is nothing to synchronize");
    }
}
