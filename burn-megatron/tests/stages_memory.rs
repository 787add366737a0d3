//! What ZeRO leaves on each rank of a model of stages between two micro-batches, with the counting allocator.

use parking_lot::Mutex;
use std::sync::Arc;

use backend_dist::memory::{RankAllocator, live};
use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::nn::{Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::prelude::*;
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{Learner, RegressionOutput, SupervisedTraining};
use burn_megatron::prelude::*;
use burn_megatron::steps_of_stages;

#[global_allocator]
static ALLOCATOR: RankAllocator = RankAllocator(std::alloc::System);

const WIDTH: usize = 256;
const BLOCKS: usize = 8;
/// Bytes of all weights, and of all gradients.
const WEIGHTS: f64 = (BLOCKS * WIDTH * WIDTH * 4) as f64;
/// Items of a data-parallel rank.
const SHARE: usize = 8;
const MICRO_BATCHES: usize = 4;

#[derive(Module, Debug)]
struct Chain {
    blocks: Vec<Linear>,
    #[module(skip)]
    seen: Seen,
}

/// What each rank held when it began a micro-batch, and when its forward pass had ended.
type Seen = Arc<Mutex<[Vec<[u64; 2]>; 2]>>;

impl Chain {
    fn note(&self, at: usize, batch: &Batch) {
        let item = batch.x.clone().slice([0..1, 0..1]).into_data().iter::<f64>().next().unwrap() as usize;
        let rank = item / SHARE;
        self.seen.lock()[at].push([rank as u64, live(rank)]);
    }
}

#[derive(Module, Debug)]
struct Batch {
    x: Tensor<2>,
}

impl Stages for Chain {
    type Activation = Tensor<2>;

    fn blocks(&self) -> usize {
        BLOCKS
    }

    fn owner(&self, path: &str) -> Option<Part> {
        Part::by_path(path, "", "blocks", "head")
    }

    fn first(&self, batch: &Batch) -> Tensor<2> {
        self.note(0, batch);
        batch.x.clone()
    }

    fn block(&self, index: usize, x: Tensor<2>, _: &Batch) -> Tensor<2> {
        // Of sequences, as in a transformer: the graph has a view of the weight.
        self.blocks[index].forward(x.unsqueeze::<3>()).squeeze_dim(0)
    }

    fn last(&self, x: Tensor<2>, batch: &Batch) -> (Tensor<1>, RegressionOutput) {
        self.note(1, batch);
        let loss = x.clone().powi_scalar(2).mean();
        (loss.clone(), RegressionOutput::new(loss, x.clone(), x))
    }
}

steps_of_stages!(Chain, Batch, RegressionOutput);

/// The number of an item in its first place.
struct Numbers;

impl Batcher<usize, Batch> for Numbers {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Batch {
        let values: Vec<f32> =
            items.iter().flat_map(|&item| (0..WIDTH).map(move |at| if at == 0 { item as f32 } else { 0.5 })).collect();
        Batch { x: Tensor::from_data(TensorData::new(values, [items.len(), WIDTH]), device) }
    }
}

/// What both ranks held before the last micro-batch of the first step, and after its forward pass.
fn held(zero: u8, reshard: bool) -> [[f64; 2]; 2] {
    let device = Device::flex().autodiff();
    let linear = |_| LinearConfig::new(WIDTH, WIDTH).with_bias(false).init(&device);
    let model = Chain { blocks: (0..BLOCKS).map(linear).collect(), seen: Seen::default() };
    let seen = model.seen.clone();
    let loader = |items: usize| {
        let items: Vec<usize> = (0..items).collect();
        DataLoaderBuilder::new(Numbers).batch_size(SHARE / MICRO_BATCHES).build(InMemDataset::new(items))
    };
    let layout = format!("DP2 ZeRO{zero}").parse().unwrap();
    let strategy = MegatronStrategy::mesh(layout).reshard_after_forward(reshard);
    let directory = tempfile::tempdir().unwrap();
    let result = SupervisedTraining::new(directory.path(), loader(2 * SHARE), loader(2))
        .with_application_logger(None)
        .renderer(Box::new(CliMetricsRenderer::new()))
        .num_epochs(1)
        .with_training_strategy(strategy.micro_batches(MICRO_BATCHES).stages().into())
        .launch(Learner::new(model, SgdConfig::new().init(), 1e-4));
    assert!(result.error.is_none(), "{}", result.error.unwrap());
    let seen = seen.lock();
    let last = |at: &Vec<[u64; 2]>, rank| at.iter().filter(|[of, _]| *of == rank).nth(MICRO_BATCHES - 1).unwrap()[1];
    seen.each_ref().map(|at| [0, 1].map(|rank| last(at, rank) as f64))
}

/// One test, because the counts are of the process.
#[test]
fn gradients_and_then_values_are_on_their_owners_only() {
    let [[one, _], [two, _], [three, after]] = [1, 2, 3].map(|zero| held(zero, true));
    let [_, gathered] = held(3, false);
    for rank in 0..2 {
        println!("rank {rank}: {} bytes with ZeRO 1, {} with 2, {} with 3", one[rank], two[rank], three[rank]);
        // Half of the gradients, then half of the values too.
        assert!(((one[rank] - two[rank]) / WEIGHTS - 0.5).abs() < 0.05, "rank {rank}: {one:?}, {two:?}");
        assert!(((two[rank] - three[rank]) / WEIGHTS - 0.5).abs() < 0.05, "rank {rank}: {two:?}, {three:?}");
        println!("rank {rank}: {} bytes after a forward pass, {} that keeps values", after[rank], gathered[rank]);
        // All but those of the first block, whose input has no gradient.
        let kept = (BLOCKS - 1) as f64 / BLOCKS as f64;
        assert!(((gathered[rank] - after[rank]) / WEIGHTS - kept).abs() < 0.05, "rank {rank}: {after:?}, {gathered:?}");
    }
}
