//! An LSTM as one writes it with Burn for one device. It learns to remember: which symbol followed the marker, up to
//! 16 symbols ago? One line, marked below, trains it in any layout of tensor and data parallelism with ZeRO.
//!
//! ```text
//! cargo run --release --example lstm -- --layout "TP2 DP2 ZeRO1"
//! ```

use std::process::ExitCode;

use burn::data::dataloader::batcher::Batcher;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig, Lstm, LstmConfig};
use burn::optim::AdamWConfig;
use burn::prelude::*;
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{ClassificationOutput, ExecutionStrategy, Learner, SupervisedTraining};
use burn_megatron::prelude::*;
use clap::Parser;
use examples::{Args, Dice, accuracy, classification_steps, loader, report, tell, trained};

const SYMBOLS: usize = 6;
/// Comes after the symbols.
const MARKER: i64 = SYMBOLS as i64;
const LENGTH: usize = 18;
const WIDTH: usize = 32;

fn main() -> ExitCode {
    report(run(&Args::parse()))
}

fn run(args: &Args) -> anyhow::Result<()> {
    let device = args.device()?;
    let (train, valid) = (loader(sequences(8192, 1), 32, Sequences), loader(sequences(512, 2), 32, Sequences));
    let model = Memory::new(&device.clone().autodiff());
    let strategy = match args.layout() {
        None => ExecutionStrategy::single(device.clone()).into(),
        Some(layout) => MegatronStrategy::mesh(layout).plan(Plan::auto().columns("lstm")).into(), // <- the line that changes
    };
    let result = SupervisedTraining::new("runs/lstm", train, valid.clone())
        .metrics((LossMetric::new(), AccuracyMetric::new()))
        .num_epochs(4)
        .with_training_strategy(strategy)
        .summary()
        .launch(Learner::new(model, AdamWConfig::new().init(), 5e-3));
    let model = trained(result)?;
    let right = accuracy(&valid, &device, |batch| model.forward(batch))?;
    tell(format_args!("{:.1} % of symbols are remembered in sequences it never saw; chance is 16.7 %", 100.0 * right));
    Ok(())
}

#[derive(Module, Debug)]
struct Memory {
    symbols: Embedding,
    lstm: Lstm,
    head: Linear,
}

impl Memory {
    fn new(device: &Device) -> Self {
        Self {
            symbols: EmbeddingConfig::new(SYMBOLS + 1, WIDTH).init(device),
            lstm: LstmConfig::new(WIDTH, WIDTH, true).init(device),
            head: LinearConfig::new(WIDTH, SYMBOLS).init(device),
        }
    }

    fn forward(&self, (sequences, answers): Batch) -> ClassificationOutput {
        let (_, last) = self.lstm.forward(self.symbols.forward(sequences), None);
        let output = self.head.forward(last.hidden);
        let loss = CrossEntropyLossConfig::new().init(&output.device()).forward(output.clone(), answers.clone());
        ClassificationOutput::new(loss, output, answers)
    }
}

classification_steps!(Memory, Batch);

#[derive(Clone, Debug)]
struct Sequence {
    symbols: Vec<i64>,
    answer: i64,
}

/// Symbols `[batch, LENGTH]` and the answer of each sequence.
type Batch = (Tensor<2, Int>, Tensor<1, Int>);

struct Sequences;

impl Batcher<Sequence, Batch> for Sequences {
    fn batch(&self, sequences: Vec<Sequence>, device: &Device) -> Batch {
        let answers: Vec<i64> = sequences.iter().map(|sequence| sequence.answer).collect();
        let symbols: Vec<i64> = sequences.into_iter().flat_map(|sequence| sequence.symbols).collect();
        let symbols = Tensor::from_data(TensorData::new(symbols, [answers.len(), LENGTH]), device);
        (symbols, Tensor::from_data(answers.as_slice(), device))
    }
}

/// Random symbols with a marker somewhere before the last one.
fn sequences(count: usize, seed: u64) -> Vec<Sequence> {
    let mut dice = Dice(seed);
    let mut draw = |_| {
        let mut symbols: Vec<i64> = (0..LENGTH).map(|_| dice.below(SYMBOLS) as i64).collect();
        let marker = dice.below(LENGTH - 1);
        symbols[marker] = MARKER;
        Sequence { answer: symbols[marker + 1], symbols }
    };
    (0..count).map(&mut draw).collect()
}
