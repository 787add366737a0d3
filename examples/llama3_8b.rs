//! Pretrains a Llama on text, in any parallel layout, and lets it write.
//!
//! Without a GPU the Llama 3 8B recipe is scaled down until a laptop finishes it in minutes; the parallel layout, the
//! data path, the optimizer and the schedule stay what they are.
//!
//! ```text
//! cargo run --release --example llama3_8b
//! cargo run --release --example llama3_8b -- --tensor-parallel 4 --data-parallel 1 --data book.txt
//! ```

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use burn::tensor::FloatDType;
use burn_megatron::cli::layout::LayoutArgs;
use burn_megatron::prelude::*;
use clap::Parser;
use examples::{Text, repository_text};

/// Pretrains a scaled-down Llama 3 8B on the repository's own text, or on yours.
#[derive(Parser)]
struct Args {
    #[command(flatten)]
    layout: LayoutArgs,
    /// Text to learn, .txt or .jsonl; the default is the repository's own sources and documents
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// Optimizer steps
    #[arg(long, default_value_t = 600)]
    steps: usize,
    /// Tokens per sample
    #[arg(long, default_value_t = 128)]
    seq_length: usize,
    /// Samples that a rank takes at once
    #[arg(long, default_value_t = 8)]
    micro_batch: usize,
    /// Samples per optimizer step over all ranks
    #[arg(long, default_value_t = 16)]
    global_batch: usize,
    /// Highest learning rate
    #[arg(long, default_value_t = 3e-3)]
    lr: f64,
    /// Steps between two checkpoints
    #[arg(long, default_value_t = 200)]
    checkpoint_every: u64,
    /// Go on from the last checkpoint, in this layout or any other
    #[arg(long)]
    resume: bool,
    /// Where everything is written
    #[arg(long, default_value = "runs/llama3_8b")]
    out: PathBuf,
}

/// The Llama 3 8B architecture in small: 4 of 32 layers, 1/32 of the width, the same 4 query heads per
/// key-value head and 3.5 times wider MLP.
fn model(vocab_size: usize) -> LlamaConfig {
    LlamaConfig {
        vocab_size,
        hidden_size: 128,
        intermediate_size: 448,
        num_hidden_layers: 4,
        num_attention_heads: 8,
        num_key_value_heads: 2,
        head_dim: 16,
        make_vocab_size_divisible_by: 8,
        ..LlamaConfig::llama3_8b()
    }
}

/// The optimizer and the schedule of Llama 3: AdamW, a warm-up and a cosine, clipping at 1.
fn recipe(args: &Args) -> EngineConfig {
    let steps = args.steps as u64;
    let lr = LrConfig {
        max: args.lr,
        min: args.lr / 10.0,
        init: 0.0,
        warmup: Span::Steps(steps / 20),
        decay: Span::Steps(steps),
        form: LrDecay::Cosine,
    };
    EngineConfig {
        optimizer: AdamWConfig { beta2: 0.95, weight_decay: 0.1, ..AdamWConfig::default() }.into(),
        clip: Some(1.0),
        seed: 1234,
        ..EngineConfig::new(args.micro_batch, args.global_batch, lr)
    }
}

fn main() -> ExitCode {
    examples::report(train(Args::parse()))
}

fn train(args: Args) -> Result<()> {
    let layout = args.layout.over(ParallelLayout { tp: 2, sp: true, dp: 2, ..Default::default() })?;
    let recipe = recipe(&args);
    // Whatever cannot work is said before the first file is written.
    model(VOCABULARY).dims().check(&layout, args.seq_length)?;
    recipe.plan(layout.dp)?;
    recipe.lr.schedule(args.global_batch)?;

    let files = match &args.data {
        Some(file) => vec![file.clone()],
        None => repository_text().map_err(anyhow::Error::msg)?,
    };
    let text = Text::prepare(files, &args.out, VOCABULARY, args.seq_length, args.steps * args.global_batch)?;
    let config = model(text.vocab_size);
    println!(
        "{}: Llama 3 8B scaled down to {:.1} million parameters, on {} CPU ranks, {layout}",
        why_cpu(),
        config.parameter_count() as f64 / 1e6,
        layout.world_size(),
    );
    println!("text: {} documents, {} tokens of a vocabulary of {}", text.documents, text.tokens, text.vocab_size);

    let prompt = text.encode("/// The ")?;
    let writing = GenerateOptions { window: Some(args.seq_length), ..GenerateOptions::new(100, Sampling::default()) };
    let held_out = text.valid.clone();
    let saver = SaverOptions {
        keep_last: Some(2),
        background: true,
        tokenizer: Some(text.tokenizer_path.clone()),
        ..Default::default()
    };
    let checkpoints =
        CheckpointOptions { root: args.out.join("checkpoints"), every: Some(args.checkpoint_every), saver };
    let description = Description {
        model: serde_json::to_value(FamilyConfig::Llama(config.clone()))?,
        config: serde_json::to_value(&recipe)?,
    };
    let data = (text.train.clone(), text.valid.clone());
    let sizes = config.clone();
    let run = Pretraining::new(Mesh::new(layout)?, recipe, args.steps, data, config.dims(), move |rank, part| {
        Ok(Llama::build(&config, ParamBuilder::new(rank, FloatDType::F32, 1234).with_part(part))?)
    })
    .directory(&args.out)
    .checkpoints(checkpoints)
    .resume(if args.resume { Resume::IfPresent } else { Resume::Never })
    .describe(description)
    .finish(move |rank, engine| {
        let loss = loss_over(engine, &held_out)?.loss;
        let params = ParamBuilder::new(rank, FloatDType::F32, 1234).without_autodiff();
        let model = engine.fill(Llama::build(&sizes, params)?);
        // The replicas hold the same model: one of them writes.
        let written = match rank.coords.dp {
            0 => generate(rank, &model, &prompt, &writing, |_| ControlFlow::Continue(()))?.tokens,
            _ => Vec::new(),
        };
        Ok((loss, [prompt.clone(), written].concat()))
    });

    let (training, learner) = run.supervised();
    let result = training.launch(learner);
    let failed = result.error.is_some();
    drop(result); // Gives the terminal back.
    if failed {
        std::process::exit(1); // The strategy has said why.
    }
    let (loss, sample) = run.finished().context("the training ended without a model")?;
    println!("\nheld-out text: loss {loss:.4}, perplexity {:.1}", loss.exp());
    println!("the model writes:\n{}\n", text.decode(&sample)?);
    println!("written to {}: checkpoints, tokenizer and tokens, steps.jsonl, metrics per epoch", args.out.display());
    println!(
        "  write more:  cargo run --release -- generate --checkpoint {}/checkpoints --prompt \"/// The \"",
        args.out.display()
    );
    Ok(())
}

/// Entries of the tokenizer.
const VOCABULARY: usize = 1024;

fn why_cpu() -> &'static str {
    match Path::new("/dev/nvidia0").exists() {
        true => "there is a GPU, but this version trains on CPU ranks",
        false => "no GPU found",
    }
}
