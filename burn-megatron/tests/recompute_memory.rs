//! What recomputation of blocks saves of a plain Burn model, with the counting allocator.

use std::sync::Arc;

use backend_dist::memory::{RankAllocator, peak, reset_peak};
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::module::{ModuleVisitor, Param};
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::prelude::*;
use burn::tensor::activation::relu;
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{Learner, RegressionOutput, SupervisedTraining};
use burn_megatron::prelude::*;
use burn_megatron::steps_of_stages;

#[global_allocator]
static ALLOCATOR: RankAllocator = RankAllocator(std::alloc::System);

const WIDTH: usize = 64;
const ITEMS: usize = 512;
const BLOCKS: usize = 8;
/// Bytes of an activation.
const ACTIVATION: u64 = (ITEMS * WIDTH * 4) as u64;

#[derive(Module, Debug)]
struct Mlp {
    up: Vec<Linear>,
    down: Vec<Linear>,
    dropout: Dropout,
    head: Linear,
}

#[derive(Module, Debug)]
struct Batch {
    x: Tensor<2>,
}

impl Mlp {
    fn new(device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        Self {
            up: (0..BLOCKS).map(|_| linear(WIDTH, 4 * WIDTH)).collect(),
            down: (0..BLOCKS).map(|_| linear(4 * WIDTH, WIDTH)).collect(),
            dropout: DropoutConfig::new(0.1).init(),
            head: linear(WIDTH, 1),
        }
    }
}

impl Stages for Mlp {
    type Activation = Tensor<2>;

    fn blocks(&self) -> usize {
        BLOCKS
    }

    fn owner(&self, path: &str) -> Option<Part> {
        let block = |list| Part::by_path(path, "", list, "head");
        block("up").or_else(|| block("down"))
    }

    fn first(&self, batch: &Batch) -> Tensor<2> {
        batch.x.clone()
    }

    fn block(&self, index: usize, x: Tensor<2>, _: &Batch) -> Tensor<2> {
        let hidden = self.dropout.forward(relu(self.up[index].forward(x.clone())));
        x + self.down[index].forward(hidden)
    }

    fn last(&self, x: Tensor<2>, _: &Batch) -> (Tensor<1>, RegressionOutput) {
        let y = self.head.forward(x);
        let loss = MseLoss::new().forward(y.clone(), y.zeros_like(), Reduction::Mean);
        (loss.clone(), RegressionOutput::new(loss, y.clone(), y))
    }
}

steps_of_stages!(Mlp, Batch, RegressionOutput);

struct Sines;

impl Batcher<usize, Batch> for Sines {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Batch {
        let value = |item: usize, at: usize| ((item * 13 + at * (item % 7 + 1)) as f32 * 0.37).sin();
        let values: Vec<f32> = items.iter().flat_map(|&item| (0..WIDTH).map(move |at| value(item, at))).collect();
        Batch { x: Tensor::from_data(TensorData::new(values, [items.len(), WIDTH]), device) }
    }
}

fn loader() -> Arc<dyn DataLoader<Batch>> {
    DataLoaderBuilder::new(Sines).batch_size(ITEMS).build(InMemDataset::new((0..2 * ITEMS).collect::<Vec<_>>()))
}

#[derive(Default)]
struct All(Vec<f32>);

impl ModuleVisitor for All {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.extend(param.val().into_data().iter::<f32>());
    }
}

/// The trained numbers, and the most that each rank held.
fn trained(layout: &str, recompute: Recompute) -> (Vec<f32>, Vec<u64>) {
    let device = Device::flex();
    device.seed(7);
    let layout: ParallelLayout = layout.parse().unwrap();
    let ranks = layout.world_size();
    (0..ranks).for_each(reset_peak);
    let strategy = MegatronStrategy::mesh(layout).recompute(recompute).stages();
    let model = Mlp::new(&device.autodiff());
    let directory = tempfile::tempdir().unwrap();
    let result = SupervisedTraining::new(directory.path(), loader(), loader())
        .with_application_logger(None)
        .renderer(Box::new(CliMetricsRenderer::new()))
        .num_epochs(1)
        .with_training_strategy(strategy.into())
        .launch(Learner::new(model, SgdConfig::new().init(), 1e-2));
    assert!(result.error.is_none(), "{}", result.error.unwrap());
    let mut all = All::default();
    result.model.visit(&mut all);
    (all.0, (0..ranks).map(peak).collect())
}

/// One test, because the counts are of the process.
#[test]
fn recomputed_blocks_keep_only_their_inputs() {
    for (layout, blocks) in [("TP1", BLOCKS as u64), ("PP2", BLOCKS as u64 / 2)] {
        let (plain, without) = trained(layout, Recompute::default());
        let (recomputed, with) = trained(layout, Recompute::full());
        assert_eq!(plain, recomputed, "{layout}");
        for (rank, (without, with)) in without.into_iter().zip(with).enumerate() {
            println!("{layout}, rank {rank}: {without} bytes without recomputation, {with} with");
            // Each block but the one that runs keeps at least what the ReLU and the dropout need, four times its input each.
            let saved = (blocks - 1) * 8 * ACTIVATION;
            assert!(with + saved <= without, "{layout}, rank {rank}: {without} bytes, {with} with recomputation");
        }
    }
}
