//! nanoGPT's smallest recipe: trains a character-level GPT of 0.8 million parameters.
//!
//! 4 layers, 4 heads, hidden size 128, context 64, batches of 12 random windows, 2000 steps, AdamW from 1e-3 to 1e-4,
//! the last tenth of the text held out (<https://github.com/karpathy/nanoGPT>, `config/train_shakespeare_char.py` as its
//! README sets it for a CPU).
//!
//! ```text
//! cargo run --release --example shakespeare_char -- --data tinyshakespeare.txt
//! ```

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use backend_dist::process::Cluster;
use burn::tensor::FloatDType;
use burn_megatron::cli::layout::LayoutArgs;
use burn_megatron::console::format::duration;
use burn_megatron::data::{RandomWindows, TokensInMemory};
use burn_megatron::prelude::*;
use clap::Parser;
use examples::{at_least_one, tell};

/// Trains a character-level GPT with nanoGPT's recipe.
#[derive(Parser)]
struct Args {
    /// Training text
    #[arg(long, value_name = "FILE")]
    data: PathBuf,
    /// Optimizer steps
    #[arg(long, default_value_t = 2000, value_parser = at_least_one)]
    steps: usize,
    /// Seed of initial weights and windows
    #[arg(long, default_value_t = 1337, allow_negative_numbers = true)]
    seed: u64,
    /// Folder for logs
    #[arg(long, default_value = "runs/shakespeare_char")]
    out: PathBuf,
    #[command(flatten)]
    layout: LayoutArgs,
}

const CONTEXT: usize = 64;
const BATCH: usize = 12;

fn recipe(steps: usize, data_parallel: usize) -> EngineConfig {
    let steps = steps as u64;
    let lr = LrConfig {
        max: 1e-3,
        min: 1e-4,
        init: 0.0,
        warmup: Span::Steps(100.min(steps / 2)),
        decay: Span::Steps(steps),
        form: LrDecay::Cosine,
    };
    EngineConfig {
        optimizer: AdamWConfig { beta2: 0.99, weight_decay: 0.1, ..AdamWConfig::default() }.into(),
        clip: Some(1.0),
        seed: 1337,
        ..EngineConfig::new((BATCH / data_parallel).max(1), BATCH, lr)
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    examples::together(|cluster| train(args, cluster))
}

fn train(args: Args, cluster: &Cluster) -> Result<()> {
    let start = Instant::now();
    let layout = args.layout.over(ParallelLayout::default())?;
    let text = std::fs::read_to_string(&args.data).with_context(|| args.data.display().to_string())?;
    let mut characters: Vec<char> = text.chars().collect();
    characters.sort_unstable();
    characters.dedup();
    let id = |character| characters.binary_search(&character).expect("every character is listed") as i64;
    let ids: Vec<i64> = text.chars().map(id).collect();
    let (train, valid) = ids.split_at(ids.len() / 10 * 9);
    if valid.len() <= CONTEXT {
        bail!("{} has {} characters; at least {} are needed", args.data.display(), ids.len(), 10 * (CONTEXT + 1));
    }

    let config = GptConfig {
        vocab_size: characters.len(),
        max_position_embeddings: CONTEXT,
        hidden_size: 128,
        intermediate_size: 512,
        num_hidden_layers: 4,
        num_attention_heads: 4,
        gelu_tanh: false,
        bias: false,
        ..GptConfig::gpt2()
    };
    let config = GptConfig { make_vocab_size_divisible_by: 1, ..config };
    let recipe = recipe(args.steps, layout.dp);
    config.dims().check(&layout, CONTEXT)?;
    recipe.plan(layout.dp)?;
    recipe.lr.schedule(BATCH)?;
    tell(format_args!("{} characters, vocabulary {}; {layout}", ids.len(), characters.len()));

    let windows = RandomWindows::new(train, CONTEXT, args.steps * BATCH, args.seed);
    let held_out = Arc::new(TokensInMemory::new(valid, CONTEXT));
    let data = (Arc::new(windows) as _, Arc::new(RandomWindows::new(valid, CONTEXT, 20 * BATCH, 1338)) as _);
    let prompt = vec![ids[0]];
    let writing = GenerateOptions { window: Some(CONTEXT), ..GenerateOptions::new(300, Sampling::default()) };
    let sizes = config.clone();
    let mesh = Mesh::new(layout)?;
    let processes = cluster.processes(&mesh)?;
    let run = Pretraining::new(mesh, recipe, args.steps, data, config.dims(), move |rank, part| {
        Ok(Gpt::build(&config, ParamBuilder::new(rank, FloatDType::F32, args.seed).with_part(part))?)
    })
    .processes(processes)
    .directory(&args.out)
    .evaluate(250, 20)
    .finish(move |rank, engine| {
        let loss = loss_over(engine, &(held_out.clone() as _))?.loss;
        let params = ParamBuilder::new(rank, FloatDType::F32, args.seed).without_autodiff();
        let model = engine.fill(Gpt::build(&sizes, params)?);
        let written = match rank.coords.dp {
            0 => generate(rank, &model, &prompt, &writing, |_| ControlFlow::Continue(()))?.tokens,
            _ => Vec::new(),
        };
        Ok((loss, written))
    });

    let Some((loss, sample)) = examples::pretrain(&run, cluster)? else { return Ok(()) };
    println!("\n{}\n", sample.iter().map(|id| characters[*id as usize]).collect::<String>());
    println!("whole held-out tenth: loss {loss:.4}; {} from start to end", duration(start.elapsed().as_secs_f64()));
    println!("written to {}", args.out.display());
    Ok(())
}
