//! Layers whose weights are saved transposed, as `LinearLayout::Col` of burn-nn does: records have another shape than the
//! values.

use std::path::Path;
use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, LinearLayout};
use burn::optim::AdamWConfig;
use burn::prelude::*;
use burn::tensor::FloatDType;
use burn::train::{ExecutionStrategy, Learner, LearningResult, RegressionOutput, TrainingStrategy};
use burn_megatron::prelude::*;

use crate::classifier::generator;
use crate::cpu;
use crate::runs::{regression_steps, trained, training, zero};
use crate::setup::{difference, interleaved};
use crate::values::All;

const INPUTS: usize = 6;
const HIDDEN: usize = 8;
const ITEMS: usize = 32;
const BATCH: usize = 4;

#[derive(Module, Debug)]
struct Net {
    wide: Linear,
    square: Linear,
    norm: Option<BatchNorm>,
    head: Linear,
}

type Batch = (Tensor<2>, Tensor<2>);

impl Net {
    fn new(norm: bool) -> Self {
        let device = &cpu().autodiff();
        let columns = |inputs| LinearConfig::new(inputs, HIDDEN).with_layout(LinearLayout::Col).init(device);
        Self {
            wide: columns(INPUTS),
            square: columns(HIDDEN),
            norm: norm.then(|| BatchNormConfig::new(HIDDEN).init(device)),
            head: LinearConfig::new(HIDDEN, 2).init(device),
        }
    }

    fn forward(&self, (x, y): Batch) -> RegressionOutput {
        let x = self.square.forward(self.wide.forward(x).tanh());
        let x = if let Some(norm) = &self.norm { norm.forward(x) } else { x };
        let predicted = self.head.forward(x.tanh());
        let loss = (predicted.clone() - y.clone()).powi_scalar(2).mean();
        RegressionOutput::new(loss, predicted, y)
    }

    fn numbers(&self) -> Vec<f64> {
        assert_eq!((self.wide.weight.dims(), self.square.weight.dims()), ([INPUTS, HIDDEN], [HIDDEN, HIDDEN]));
        let mut all = All::default();
        self.visit(&mut all);
        all.0
    }
}

regression_steps!(Net, Batch);

struct Rows;

impl Batcher<usize, Batch> for Rows {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Batch {
        let x: Vec<f64> = items
            .iter()
            .flat_map(|item| (0..INPUTS).map(move |at| ((item * 7 + at * 3) as f64 * 0.37).sin()))
            .collect();
        let y: Vec<f64> = items.iter().flat_map(|item| [(*item as f64 * 0.6).cos(), *item as f64 / 40.0]).collect();
        let [x, y] = [(x, INPUTS), (y, 2)].map(|(values, width)| TensorData::new(values, [items.len(), width]));
        (Tensor::from_data(x, device), Tensor::from_data(y, device))
    }
}

fn loader(items: Vec<usize>, batch: usize) -> Arc<dyn DataLoader<Batch>> {
    DataLoaderBuilder::new(Rows).batch_size(batch).build(InMemDataset::new(items))
}

struct Run {
    norm: bool,
    items: Vec<usize>,
    batch: usize,
    epochs: usize,
    /// Keeps checkpoints, and resumes from that of an epoch.
    checkpoints: Option<Option<usize>>,
}

impl Run {
    fn new(norm: bool) -> Self {
        Self { norm, items: (0..ITEMS).collect(), batch: BATCH, epochs: 4, checkpoints: None }
    }

    fn run(&self, directory: &Path, strategy: TrainingStrategy<Net>) -> LearningResult<Net> {
        let _generator = generator();
        cpu().seed(5);
        let loaders = [loader(self.items.clone(), self.batch), loader((0..10).collect(), BATCH)];
        let training = training(directory, loaders, self.epochs, self.checkpoints, strategy);
        let net = Net::new(self.norm);
        if self.checkpoints.flatten().is_none() {
            // Draws the parameters. Burn loads no record of such a layer once they are drawn.
            net.numbers();
        }
        training.launch(Learner::new(net, AdamWConfig::new().init(), 0.02))
    }

    fn numbers(&self, directory: &Path, strategy: TrainingStrategy<Net>) -> Vec<f64> {
        trained(self.run(directory, strategy)).numbers()
    }
}

/// The trained numbers with checkpoints, and those of a run that resumed from the second.
fn whole_and_resumed(norm: bool, strategy: impl Fn() -> TrainingStrategy<Net>) -> [Vec<f64>; 2] {
    let run = |directory: &Path, epochs, resume| {
        Run { epochs, checkpoints: Some(resume), ..Run::new(norm) }.numbers(directory, strategy())
    };
    let [first, second] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    run(second.path(), 2, None);
    [run(first.path(), 4, None), run(second.path(), 4, Some(2))]
}

fn mesh(layout: &str) -> MeshStrategy {
    MegatronStrategy::mesh(layout.parse().unwrap()).units(Units::auto().keep_below(2))
}

fn sharded(layout: &str) -> TrainingStrategy<Net> {
    mesh(layout).plan(Plan::auto().columns("wide").rows("square")).into()
}

#[test]
fn they_train_and_resume_as_on_one_device() {
    let alone = Run { items: interleaved(ITEMS, 2, BATCH), batch: 2 * BATCH, ..Run::new(false) };
    let directory = tempfile::tempdir().unwrap();
    let alone = alone.numbers(directory.path(), ExecutionStrategy::single(cpu()).into());
    let close = |found: [Vec<f64>; 2], what: &str| {
        for (run, found) in ["whole", "resumed"].iter().zip(found) {
            let gap = difference(&found, &alone);
            assert!(gap < 1e-10, "{what}, {run}: {gap}");
        }
    };
    for stage in 0..=3 {
        close(whole_and_resumed(false, || zero(stage, 2)), &format!("ZeRO {stage}"));
    }
    for layout in ["TP2 DP2", "TP2 DP2 ZeRO1", "TP2 DP2 ZeRO3"] {
        close(whole_and_resumed(false, || sharded(layout)), layout);
    }
    close(
        whole_and_resumed(false, || mesh("DP2").overlap_grad_reduce().into()),
        "gradients reduced in the backward pass",
    );
}

/// Every rank has its share of each part of a matrix, and files have the matrix as the model has it.
#[test]
fn matrices_in_parts_train_and_resume_on_one_device_and_back() {
    let in_parts = |layout: &str| -> TrainingStrategy<Net> {
        let plan = Plan::auto().columns_in_parts("wide", 2).columns_in("square", &[4, 2, 2]);
        mesh(layout).plan(plan).into()
    };
    let single = || -> TrainingStrategy<Net> { ExecutionStrategy::single(cpu()).into() };
    let alone = |run: Run| run.numbers(tempfile::tempdir().unwrap().path(), single());
    let (one, two) = (
        alone(Run::new(false)),
        alone(Run { items: interleaved(ITEMS, 2, BATCH), batch: 2 * BATCH, ..Run::new(false) }),
    );
    for layout in ["TP2 DP2", "TP2 DP2 ZeRO1", "TP2 DP2 ZeRO3"] {
        let gaps = whole_and_resumed(false, || in_parts(layout)).map(|found| difference(&found, &two));
        assert!(gaps.iter().all(|gap| *gap < 1e-10), "{layout}: {gaps:?}");
    }
    for [before, after] in [[in_parts("TP2"), single()], [single(), in_parts("TP2")]] {
        let directory = tempfile::tempdir().unwrap();
        Run { epochs: 2, checkpoints: Some(None), ..Run::new(false) }.numbers(directory.path(), before);
        let resumed = Run { checkpoints: Some(Some(2)), ..Run::new(false) }.numbers(directory.path(), after);
        assert!(difference(&resumed, &one) < 1e-10, "{}", difference(&resumed, &one));
    }
}

/// Their ranks have models of their own in every ZeRO stage.
#[test]
fn with_batch_normalization_checkpoints_change_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let without = Run::new(true).numbers(directory.path(), zero(0, 2));
    for stage in 0..=3 {
        for (run, found) in ["whole", "resumed"].iter().zip(whole_and_resumed(true, || zero(stage, 2))) {
            let gap = difference(&found, &without);
            assert!(gap < 1e-10, "ZeRO {stage}, {run}: {gap}");
        }
    }
}

/// A model without a layer that a plan knows.
#[test]
fn autocast_needs_nothing_to_shard() {
    let run = |strategy: MeshStrategy| {
        let directory = tempfile::tempdir().unwrap();
        Run { epochs: 1, ..Run::new(false) }.numbers(directory.path(), strategy.into())
    };
    for layout in ["TP1", "DP2", "DP2 ZeRO1"] {
        let gap = difference(&run(mesh(layout).autocast(FloatDType::BF16)), &run(mesh(layout)));
        assert!(gap < 0.1, "{layout}: {gap}");
    }
}
