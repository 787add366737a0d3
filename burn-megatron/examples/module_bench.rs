//! Trains an encoder of burn-nn, unmodified, through burn-train: with Burn's own strategies and in layouts of
//! `MegatronStrategy::mesh`. What counts is the time of a step, from the difference of a long and a short training. One
//! way a process: what one holds of a GPU's memory is not there for the next.
//!
//! `cargo run --release --example module_bench --features cuda -- WAYS [WIDTH] [LAYERS] [BATCH]`: 1024, 24 and 16 are
//! an encoder of 302 million parameters and 16 × 512 tokens for each data-parallel rank. `WAYS` are separated by commas:
//! `burn` is one device, `burn-ddp` Burn's `DistributedDataParallel` on two; a layout such as `TP2` in f32, and with
//! `+bf16` under autocast.

use std::time::Instant;

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use burn::optim::AdamWConfig;
use burn::prelude::*;
use burn::tensor::distributed::{DistributedConfig, ReduceOperation};
use burn::tensor::{ExecutionError, FloatDType};
use burn::train::metric::{Adaptor, ItemLazy, LossInput};
use burn::train::{
    ExecutionStrategy, InferenceStep, Learner, SupervisedTraining, TrainOutput, TrainStep, TrainingStrategy,
};
use burn_megatron::prelude::*;

const SEQUENCE: usize = 512;
/// Steps of a training that makes kernels, of a short one, and of a long one.
const STEPS: [usize; 3] = [4, 4, 24];

fn main() -> Result<(), BoxError> {
    let mut arguments = std::env::args().skip(1);
    let ways = arguments.next().unwrap_or("burn,TP1+bf16".into());
    let sizes: Vec<usize> = arguments.map(|text| text.parse()).collect::<Result<_, _>>()?;
    let size = |index: usize, default| sizes.get(index).copied().unwrap_or(default);
    let (width, layers, batch) = (size(0, 1024), size(1, 24), size(2, 16));
    println!("{:<20} {:>9} {:>12} {:>9}", "way", "step, ms", "tokens/s", "loss");
    for way in ways.split(',') {
        let mut ends = Vec::new();
        for steps in STEPS {
            ends.push(train(way, (width, layers, batch), steps)?);
        }
        let [_, (short, ..), (long, loss, ranks)] = ends[..] else { unreachable!("three trainings") };
        let step = (long - short) / (STEPS[2] - STEPS[1]) as f64;
        let tokens = (ranks * batch * SEQUENCE) as f64 / step;
        println!("{way:<20} {:>9.1} {tokens:>12.0} {loss:>9.5}", 1e3 * step);
    }
    Ok(())
}

/// Seconds, the loss on the last batch, and the number of data-parallel ranks.
fn train(
    way: &str,
    (width, layers, batch): (usize, usize, usize),
    steps: usize,
) -> Result<(f64, f64, usize), BoxError> {
    let device = device();
    let (strategy, ranks) = strategy(way)?;
    let items = (0..steps * batch * ranks).collect();
    let loader = |items| {
        let batches = DataLoaderBuilder::new(Waves { width }).batch_size(batch);
        batches.build(InMemDataset::<usize>::new(items))
    };
    device.seed(1);
    let config = TransformerEncoderConfig::new(width, 4 * width, 16, layers).with_dropout(0.0).with_norm_first(true);
    let model = Encoder { layers: config.init(&device.clone().autodiff()) };
    let directory = tempfile::tempdir()?;
    let start = Instant::now();
    let result = SupervisedTraining::new(directory.path(), loader(items), loader(vec![0]))
        .num_epochs(1)
        .with_training_strategy(strategy)
        .with_application_logger(None)
        .launch(Learner::new(model, AdamWConfig::new().init(), 1e-4));
    if let Some(error) = result.error {
        return Err(error.to_string().into());
    }
    // The valid model's loss waits for everything.
    let model = result.model.fork(&device);
    let batch = Waves { width }.batch((0..batch).collect(), &device);
    let loss = InferenceStep::step(&model, batch).0.into_scalar::<f64>();
    Ok((start.elapsed().as_secs_f64(), loss, ranks))
}

fn strategy(way: &str) -> Result<(TrainingStrategy<Encoder>, usize), BoxError> {
    let device = device();
    if way == "burn" {
        return Ok((ExecutionStrategy::single(device).into(), 1));
    }
    if way == "burn-ddp" {
        let config = DistributedConfig { all_reduce_op: ReduceOperation::Mean };
        return Ok((ExecutionStrategy::ddp(vec![numbered(0), numbered(1)], config).into(), 2));
    }
    let (layout, autocast) = way.strip_suffix("+bf16").map_or((way, false), |layout| (layout, true));
    let layout: ParallelLayout = layout.parse()?;
    let (ranks, world) = (layout.dp, layout.world_size());
    let mut strategy = MegatronStrategy::mesh(layout).devices((0..world).map(numbered).collect());
    if autocast {
        strategy = strategy.autocast(FloatDType::BF16);
    }
    Ok((strategy.into(), ranks))
}

fn device() -> Device {
    numbered(0)
}

#[cfg(feature = "cuda")]
fn numbered(index: usize) -> Device {
    Device::cuda(index)
}

#[cfg(not(feature = "cuda"))]
fn numbered(_: usize) -> Device {
    Device::flex()
}

#[derive(Module, Debug)]
struct Encoder {
    layers: TransformerEncoder,
}

impl Encoder {
    fn loss(&self, x: Tensor<3>) -> Tensor<1> {
        self.layers.forward(TransformerEncoderInput::new(x)).powi_scalar(2).mean()
    }
}

#[derive(Clone)]
struct Loss(Tensor<1>);

impl ItemLazy for Loss {
    fn sync(self) -> Result<Self, ExecutionError> {
        Ok(self)
    }
}

impl Adaptor<LossInput> for Loss {
    fn adapt(&self) -> LossInput {
        LossInput::new(self.0.clone())
    }
}

impl TrainStep for Encoder {
    type Input = Tensor<3>;
    type Output = Loss;

    fn step(&self, x: Tensor<3>) -> TrainOutput<Loss> {
        let loss = self.loss(x);
        TrainOutput::new(self, loss.backward(), Loss(loss))
    }
}

impl InferenceStep for Encoder {
    type Input = Tensor<3>;
    type Output = Loss;

    fn step(&self, x: Tensor<3>) -> Loss {
        Loss(self.loss(x))
    }
}

/// Batches `[items, sequence, width]` that are computed where they are used.
#[derive(Clone)]
struct Waves {
    width: usize,
}

impl Batcher<usize, Tensor<3>> for Waves {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Tensor<3> {
        let (first, count) = (items[0] as i64, items.len() as i64);
        let each = |n: i64, shape: [usize; 3]| Tensor::<1, Int>::arange(0..n, device).float().reshape(shape);
        let item = each(count, [items.len(), 1, 1]) + first as f64;
        let at = each(SEQUENCE as i64, [1, SEQUENCE, 1]) * 0.37 + each(self.width as i64, [1, 1, self.width]) * 0.11;
        (at + item).sin()
    }
}
