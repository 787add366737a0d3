//! BERT in training: Megatron's masked dataset over the lines of this repository's documents, byte by byte, with
//! next-sentence prediction. The model is a plain Burn module; one line, marked below, trains it in any layout of tensor,
//! sequence and data parallelism with ZeRO, or in pipelines.
//!
//! ```text
//! cargo run --release --example bert                                   # one device, burn-train's own strategy
//! cargo run --release --example bert -- --layout "TP2 SP"              # two tensor-parallel ranks
//! cargo run --release --example bert -- --layout "PP2"                 # a pipeline of its layers
//! ```

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use burn::data::dataloader::DataLoader;
use burn::data::dataloader::batcher::Batcher;
use burn::optim::AdamWConfig;
use burn::prelude::*;
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{ExecutionStrategy, InferenceStep, Learner, SupervisedTraining};
use burn_megatron::data::indexed::{Dtype, IndexedDataset, IndexedWriter};
use burn_megatron::data::masked::{BertDataset, BertOptions, BertSample, MaskVocabulary, Masking};
use burn_megatron::learner::{BertBatch, BertTraining};
use burn_megatron::prelude::*;
use clap::Parser;
use examples::{Args, loader, report, repository_text, tell, trained};

/// The tokens before those of bytes.
const SPECIAL: [&str; 5] = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"];
const LENGTH: usize = 64;
const FOLDER: &str = "runs/bert";

fn main() -> ExitCode {
    report(run(&Args::parse()))
}

fn run(args: &Args) -> anyhow::Result<()> {
    let device = args.device()?;
    let (train, valid) = samples()?;
    let (train, valid) = (loader(train, 32, Samples), loader(valid, 32, Samples));
    let config = BertConfig {
        vocab_size: 264, // 5 special tokens, 256 bytes, and a multiple of the ranks
        hidden_size: 64,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        intermediate_size: 256,
        max_position_embeddings: LENGTH,
        hidden_dropout_prob: 0.0,
        attention_probs_dropout_prob: 0.0,
        ..BertConfig::base()
    };
    let model = BertTraining { bert: Bert::new(&config, &device.clone().autodiff()) };
    let mesh = |layout| MegatronStrategy::mesh(layout).plan(Bert::plan());
    let strategy = match args.layout() {
        None => ExecutionStrategy::single(device.clone()).into(),
        Some(layout) if layout.pp > 1 => mesh(layout).micro_batches(2).stages().into(),
        Some(layout) => mesh(layout).into(), // <- the line that changes
    };
    let result = SupervisedTraining::new(FOLDER, train, valid.clone())
        .metrics((LossMetric::new(), AccuracyMetric::new().with_pad_token(0)))
        .num_epochs(3)
        .with_training_strategy(strategy)
        .summary()
        .launch(Learner::new(model, AdamWConfig::new().init(), 2e-3));
    let model = trained(result)?;
    let (right, frequent) = accuracy(&valid, &device, &model)?;
    tell(format_args!(
        "{right:.1} % of masked bytes are told right; the most frequent byte alone would be {frequent:.1} %"
    ));
    Ok(())
}

/// The share of masked bytes that are told right, and that of the most frequent one, in percent.
fn accuracy(
    loader: &Arc<dyn DataLoader<BertBatch>>,
    device: &Device,
    model: &BertTraining,
) -> anyhow::Result<(f64, f64)> {
    let (mut right, mut counts) = (0, [0; 264]);
    for batch in loader.to_device(device).iter() {
        let output = model.step(batch.map_err(|error| anyhow::anyhow!("{error}"))?);
        let told = output.output.argmax(1).into_data();
        let targets = output.targets.into_data();
        for (told, target) in told.iter::<i64>().zip(targets.iter::<i64>()).filter(|(_, target)| *target > 0) {
            right += usize::from(told == target);
            counts[target as usize] += 1;
        }
    }
    let (all, most) = (counts.iter().sum::<usize>(), counts.into_iter().max().unwrap_or(0));
    Ok((100.0 * right as f64 / all as f64, 100.0 * most as f64 / all as f64))
}

struct Samples;

impl Batcher<BertSample, BertBatch> for Samples {
    fn batch(&self, samples: Vec<BertSample>, device: &Device) -> BertBatch {
        BertBatch::new(&samples, device)
    }
}

/// Samples of the repository's documents for training, and of others for validation.
fn samples() -> anyhow::Result<(Vec<BertSample>, Vec<BertSample>)> {
    std::fs::create_dir_all(FOLDER)?;
    let prefix = Path::new(FOLDER).join("lines");
    let mut writer = IndexedWriter::create(&prefix, Dtype::U16)?;
    let mut documents = 0;
    let paths = repository_text().map_err(anyhow::Error::msg)?;
    for path in paths.iter().filter(|path| path.extension().is_some_and(|extension| extension == "md")) {
        let text = std::fs::read_to_string(path)?;
        for line in text.lines().map(str::trim).filter(|line| (8..=400).contains(&line.len())) {
            writer
                .push_sequence(&line.bytes().map(|byte| SPECIAL.len() as i64 + i64::from(byte)).collect::<Vec<_>>())?;
        }
        writer.end_document();
        documents += 1;
    }
    writer.finish()?;
    let lines = Arc::new(IndexedDataset::open(&prefix)?);
    let names = SPECIAL.map(str::to_string).into_iter().chain((0..=255).map(|byte: u8| format!("{byte:02x}")));
    let names: Vec<String> = names.collect();
    let vocabulary = MaskVocabulary::word_piece(names.iter().map(String::as_str))?;
    let read = |documents, num_samples, seed| -> anyhow::Result<Vec<BertSample>> {
        let defaults = BertOptions::new(LENGTH, seed);
        // A byte is a token and a word: spans of three of them are hard to tell.
        let masking = Masking { max_ngram: 1, ..defaults.masking };
        let options = BertOptions { num_samples: Some(num_samples), masking, ..defaults };
        let data = BertDataset::new(lines.clone(), documents, vocabulary.clone(), options)?;
        Ok((0..num_samples).map(|index| data.sample(index)).collect::<Result<_, _>>()?)
    };
    let held_out = documents / 8;
    Ok((read(held_out..documents, 4096, 1)?, read(0..held_out, 512, 2)?))
}
