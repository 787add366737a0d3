//! A text classifier as one writes it with Burn for one device: embeddings, `TransformerEncoder`, padding masks,
//! cross-entropy. It learns to tell this repository's lines of Rust, Markdown and TOML. One line, marked below, trains
//! it in any layout of tensor, sequence and data parallelism with ZeRO. `Stages`, by which it says what its blocks are,
//! trains it in pipelines.
//!
//! ```text
//! cargo run --release --example text_classifier                          # one device, burn-train's own strategy
//! cargo run --release --example text_classifier -- --ranks 2 --zero 1    # two ranks, optimizer states sharded
//! cargo run --release --example text_classifier -- --layout "TP2 DP2 ZeRO1"    # and the model sharded over two more
//! cargo run --release --example text_classifier -- --layout "PP2 DP2"    # a pipeline of its blocks
//! cargo run --release --example text_classifier --features cuda -- --device cuda --ranks 4    # GPUs 0 to 3
//! ```

use std::process::ExitCode;

use burn::data::dataloader::batcher::Batcher;
use burn::nn::attention::generate_padding_mask;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::prelude::*;
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{ClassificationOutput, ExecutionStrategy, Learner, SupervisedTraining};
use burn_megatron::prelude::*;
use burn_megatron::steps_of_stages;
use clap::Parser;
use examples::{Args, Dice, accuracy, loader, report, repository_text, tell, trained};

/// File name extensions of the classes.
const CLASSES: [&str; 3] = ["rs", "md", "toml"];
/// Bytes of a line that count.
const LENGTH: usize = 40;
/// The token that every line begins with, whose encoding is classified, and the one that pads.
const START: usize = 256;
const PAD: usize = 257;
const WIDTH: usize = 48;

fn main() -> ExitCode {
    report(run(&Args::parse()))
}

fn run(args: &Args) -> anyhow::Result<()> {
    let device = args.device()?;
    let (train, valid) = lines()?;
    let (train, valid) = (loader(train, 32, Lines), loader(valid, 32, Lines));
    let model = TextClassifier::new(&device.clone().autodiff());
    let strategy = match args.layout() {
        None => ExecutionStrategy::single(device.clone()).into(),
        Some(layout) if layout.pp > 1 => MegatronStrategy::mesh(layout).micro_batches(2).stages().into(),
        Some(layout) => MegatronStrategy::mesh(layout).into(), // <- the line that changes
    };
    let result = SupervisedTraining::new("runs/text_classifier", train, valid.clone())
        .metrics((LossMetric::new(), AccuracyMetric::new()))
        .num_epochs(3)
        .with_training_strategy(strategy)
        .summary()
        .launch(Learner::new(model, AdamWConfig::new().init(), 2e-3));
    let model = trained(result)?;
    let right = accuracy(&valid, &device, |batch| model.run(&batch).1)?;
    tell(format_args!("{:.1} % of lines from files it never saw are told right; chance is 33.3 %", 100.0 * right));
    Ok(())
}

#[derive(Module, Debug)]
struct TextClassifier {
    tokens: Embedding,
    positions: Embedding,
    encoder: TransformerEncoder,
    head: Linear,
}

impl TextClassifier {
    fn new(device: &Device) -> Self {
        Self {
            tokens: EmbeddingConfig::new(PAD + 1, WIDTH).init(device),
            positions: EmbeddingConfig::new(LENGTH + 1, WIDTH).init(device),
            encoder: TransformerEncoderConfig::new(WIDTH, 2 * WIDTH, 4, 2).with_norm_first(true).init(device),
            head: LinearConfig::new(WIDTH, CLASSES.len()).init(device),
        }
    }
}

/// The model as a chain: embeddings, the encoder's layers, the head with the loss.
impl Stages for TextClassifier {
    type Activation = Tensor<3>;

    fn blocks(&self) -> usize {
        self.encoder.layers.len()
    }

    fn owner(&self, path: &str) -> Option<Part> {
        Part::by_path(path, "tokens|positions", "encoder.layers", "head")
    }

    fn first(&self, batch: &Batch) -> Tensor<3> {
        let ([_, length], device) = (batch.tokens.dims(), batch.tokens.device());
        let positions = Tensor::<1, Int>::arange(0..length as i64, &device).reshape([1, length]);
        self.tokens.forward(batch.tokens.clone()) + self.positions.forward(positions)
    }

    fn block(&self, index: usize, x: Tensor<3>, batch: &Batch) -> Tensor<3> {
        self.encoder.layers[index].forward(x, Some(batch.padding.clone()), None)
    }

    fn last(&self, x: Tensor<3>, batch: &Batch) -> (Tensor<1>, ClassificationOutput) {
        let [count, _, _] = x.dims();
        let output = self.head.forward(x.slice([0..count, 0..1]).reshape([count, WIDTH]));
        let classes = batch.classes.clone();
        let loss = CrossEntropyLossConfig::new().init(&output.device()).forward(output.clone(), classes.clone());
        (loss.clone(), ClassificationOutput::new(loss, output, classes))
    }
}

steps_of_stages!(TextClassifier, Batch, ClassificationOutput);

#[derive(Clone, Debug)]
struct Line {
    bytes: Vec<usize>,
    class: i64,
}

/// Tokens and padding `[batch, length]`, with the length of the longest line, and the class of each line.
#[derive(Module, Debug)]
struct Batch {
    tokens: Tensor<2, Int>,
    padding: Tensor<2, Bool>,
    classes: Tensor<1, Int>,
}

struct Lines;

impl Batcher<Line, Batch> for Lines {
    fn batch(&self, lines: Vec<Line>, device: &Device) -> Batch {
        let classes: Vec<i64> = lines.iter().map(|line| line.class).collect();
        let bytes = lines.into_iter().map(|line| line.bytes).collect();
        let padded = generate_padding_mask(PAD, bytes, Some(LENGTH + 1), device);
        Batch { tokens: padded.tensor, padding: padded.mask, classes: Tensor::from_data(classes.as_slice(), device) }
    }
}

/// Lines of the repository's files, all classes as often, for training and from other files for validation.
fn lines() -> anyhow::Result<(Vec<Line>, Vec<Line>)> {
    let mut known = [[const { Vec::new() }; 3], [const { Vec::new() }; 3]];
    for (index, path) in repository_text().map_err(anyhow::Error::msg)?.into_iter().enumerate() {
        let extension = path.extension().and_then(|extension| extension.to_str());
        let Some(class) = CLASSES.iter().position(|class| extension == Some(class)) else { continue };
        let text = std::fs::read_to_string(&path)?;
        let long = text.lines().filter(|line| line.trim().len() >= 8).map(str::to_owned);
        known[usize::from(index % 8 == 0)][class].extend(long);
    }
    let mut dice = Dice(1);
    let mut draw = |lines: &[Vec<String>; 3], count: usize| {
        let line = |index: usize| {
            let class = index % CLASSES.len();
            let text = &lines[class][dice.below(lines[class].len())];
            let bytes = [START].into_iter().chain(text.bytes().map(usize::from)).collect();
            Line { bytes, class: class as i64 }
        };
        (0..count).map(line).collect()
    };
    Ok((draw(&known[0], 3072), draw(&known[1], 384)))
}
