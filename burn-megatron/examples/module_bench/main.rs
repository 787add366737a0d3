//! Trains a model of burn-nn, unmodified, through burn-train: with Burn's own strategies and in layouts of
//! `MegatronStrategy::mesh`. What counts is the time of a step of the first rank, after those that make kernels. One way a
//! process: what one holds of a GPU's memory is not there for the next.
//!
//! `cargo run --release --example module_bench --features cuda -- WAYS MODEL [WIDTH] [LAYERS] [BATCH] [SEQUENCE]`:
//! `encoder` is a `TransformerEncoder` of 302 million parameters (1024, 24) and 16 × 512 tokens for each data-parallel
//! rank, unless sizes are given; `padded` is that with a padding mask, `dropout` also with Burn's usual dropout of 0.1;
//! `llama` has the shape of Llama 3.2 1B (2048, 16) and 1 × 4096 tokens, to compare with
//! `burn-megatron bench llama3-1b --training.micro-batch 1`. `WAYS` are separated by commas: `burn` is one device,
//! `burn-ddp` Burn's `DistributedDataParallel` on two; a layout such as `TP2` in f32, with `+bf16` under autocast, with
//! `+fp8` layers in FP8 next to that, with `+overlap` gradients reduced during the backward pass, with `+keep` parameters of ZeRO 3 that stay gathered until then,
//! with `+fused` the fused AdamW, with `+profile` a table of kernels, whose recording takes time too:
//! `DP2 ZeRO1+bf16+overlap+fused`.

mod clock;
mod llama;

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
use clock::{STEPS, Step, tick};
use llama::Llama;

/// As in our programs; an encoder's step on an H200 took 83 ms with the system's and 69 ms with this.
#[cfg(feature = "cuda")]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> Result<(), BoxError> {
    let mut arguments = std::env::args().skip(1);
    let ways = arguments.next().unwrap_or("burn,TP1+bf16".into());
    let model = arguments.next().unwrap_or("encoder".into());
    let given: Vec<usize> = arguments.map(|text| text.parse()).collect::<Result<_, _>>()?;
    let (kind, usual) = match model.as_str() {
        "encoder" => (Kind::Encoder, [1024, 24, 16, 512]),
        "padded" => (Kind::Padded, [1024, 24, 16, 512]),
        "dropout" => (Kind::Dropout, [1024, 24, 16, 512]),
        "llama" => (Kind::Llama, [2048, 16, 1, 4096]),
        other => return Err(format!("model {other}; nearest legal: encoder, padded, dropout, llama").into()),
    };
    let size = |index: usize| given.get(index).copied().unwrap_or(usual[index]);
    let sizes = Sizes { kind, width: size(0), layers: size(1), batch: size(2), sequence: size(3) };
    println!("{:<24} {:>9} {:>12} {:>9} {:>10}", "way", "step, ms", "tokens/s", "loss", "operations");
    for way in ways.split(',') {
        let (loss, ranks) = train(way, sizes)?;
        let Step { seconds, report, threads } = clock::read().ok_or("the training ended before its last step")?;
        let tokens = (ranks * sizes.batch * sizes.sequence) as f64 / seconds;
        let busy: Vec<String> = threads.iter().map(|(name, busy)| format!("{name} {:.1}", 1e3 * busy)).collect();
        println!("{report}threads, ms of a step: {}", busy.join(", "));
        let operations = report.operations / STEPS[1];
        println!("{way:<24} {:>9.1} {tokens:>12.0} {loss:>9.5} {operations:>10}", 1e3 * seconds);
    }
    Ok(())
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Encoder,
    Padded,
    Dropout,
    Llama,
}

/// The model, and the batch of each data-parallel rank.
#[derive(Clone, Copy)]
struct Sizes {
    kind: Kind,
    width: usize,
    layers: usize,
    batch: usize,
    sequence: usize,
}

/// The loss on the first batch after the training, and the number of data-parallel ranks.
fn train(way: &str, sizes: Sizes) -> Result<(f64, usize), BoxError> {
    let batch = sizes.batch;
    let device = device();
    let (strategy, ranks) = strategy(way)?;
    let optimizer = AdamWConfig::new();
    let optimizer = if way.contains("+fused") { optimizer.init_fused() } else { optimizer.init() };
    let items = (0..(STEPS[0] + STEPS[1] + 1) * batch * ranks).collect();
    let loader = |items| {
        let batches = DataLoaderBuilder::new(sizes).batch_size(batch);
        batches.build(InMemDataset::<usize>::new(items))
    };
    device.seed(1);
    clock::start(ranks);
    let model = Model::new(sizes, &device.clone().autodiff());
    let directory = tempfile::tempdir()?;
    let result = SupervisedTraining::new(directory.path(), loader(items), loader(vec![0]))
        .num_epochs(1)
        .with_training_strategy(strategy)
        .with_application_logger(None)
        .launch(Learner::new(model, optimizer, 1e-4));
    if let Some(error) = result.error {
        return Err(error.to_string().into());
    }
    let model = result.model.fork(&device);
    let batch = sizes.batch((0..batch).collect(), &device);
    let loss = InferenceStep::step(&model, batch).0.into_scalar::<f64>();
    Ok((loss, ranks))
}

fn strategy(way: &str) -> Result<(TrainingStrategy<Model>, usize), BoxError> {
    let device = device();
    if way == "burn" {
        return Ok((ExecutionStrategy::single(device).into(), 1));
    }
    if way == "burn-ddp" {
        let config = DistributedConfig { all_reduce_op: ReduceOperation::Mean };
        return Ok((ExecutionStrategy::ddp(vec![numbered(0), numbered(1)], config).into(), 2));
    }
    let mut parts = way.split('+');
    let layout: ParallelLayout = parts.next().unwrap_or_default().parse()?;
    let (ranks, world) = (layout.dp, layout.world_size());
    let mut strategy = MegatronStrategy::mesh(layout).devices((0..world).map(numbered).collect());
    for part in parts {
        strategy = match part {
            "bf16" => strategy.autocast(FloatDType::BF16),
            "fp8" => strategy.fp8(),
            "overlap" => strategy.overlap_grad_reduce(),
            "keep" => strategy.reshard_after_forward(false),
            "fused" | "profile" => strategy,
            other => return Err(format!("+{other}; legal: +bf16, +fp8, +overlap, +keep, +fused, +profile").into()),
        };
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
#[expect(clippy::large_enum_variant, reason = "there is one")]
enum Model {
    Encoder(TransformerEncoder),
    Llama(Llama),
}

#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "there is one at a time")]
enum Batch {
    /// `[items, sequence, width]`, and which of the positions `[items, sequence]` are padding.
    Waves(Tensor<3>, Option<Tensor<2, Bool>>),
    /// `[items, sequence + 1]`.
    Tokens(Tensor<2, Int>),
}

impl Model {
    fn new(Sizes { kind, width, layers, sequence, .. }: Sizes, device: &Device) -> Self {
        if kind == Kind::Llama {
            return Self::Llama(Llama::new(width, layers, sequence, device));
        }
        let config = TransformerEncoderConfig::new(width, 4 * width, 16, layers);
        Self::Encoder(
            config.with_dropout(if kind == Kind::Dropout { 0.1 } else { 0.0 }).with_norm_first(true).init(device),
        )
    }

    fn loss(&self, batch: Batch) -> Tensor<1> {
        match (self, batch) {
            (Self::Encoder(layers), Batch::Waves(x, padding)) => {
                let input = TransformerEncoderInput::new(x);
                let input = padding.into_iter().fold(input, TransformerEncoderInput::mask_pad);
                layers.forward(input).powi_scalar(2).mean()
            }
            (Self::Llama(llama), Batch::Tokens(tokens)) => llama.loss(tokens),
            _ => unreachable!("batches are made for the model"),
        }
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

impl TrainStep for Model {
    type Input = Batch;
    type Output = Loss;

    fn step(&self, batch: Batch) -> TrainOutput<Loss> {
        let is_last = match self {
            Self::Encoder(layers) => tick(&layers.layers[0].norm_1.gamma.val()),
            Self::Llama(llama) => tick(&llama.norm.gamma.val()),
        };
        let loss = self.loss(batch);
        if is_last {
            println!("loss in training {:.5}", loss.clone().into_scalar::<f64>());
        }
        TrainOutput::new(self, loss.backward(), Loss(loss))
    }
}

impl InferenceStep for Model {
    type Input = Batch;
    type Output = Loss;

    fn step(&self, batch: Batch) -> Loss {
        Loss(self.loss(batch))
    }
}

/// Batches that are computed where they are used.
impl Batcher<usize, Batch> for Sizes {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Batch {
        let Self { kind, width, sequence, .. } = *self;
        if kind == Kind::Llama {
            return Batch::Tokens(llama::tokens(&items, sequence, device));
        }
        let (first, count) = (items[0] as i64, items.len() as i64);
        let each = |n: i64, shape: [usize; 3]| Tensor::<1, Int>::arange(0..n, device).float().reshape(shape);
        let item = each(count, [items.len(), 1, 1]) + first as f64;
        let at = each(sequence as i64, [1, sequence, 1]) * 0.37 + each(width as i64, [1, 1, width]) * 0.11;
        let padding = matches!(kind, Kind::Padded | Kind::Dropout).then(|| {
            // The last eighth.
            let position = Tensor::<1, Int>::arange(0..sequence as i64, device);
            position
                .greater_equal_elem((sequence - sequence / 8) as i64)
                .unsqueeze::<2>()
                .expand([items.len(), sequence])
        });
        Batch::Waves((at + item).sin(), padding)
    }
}
