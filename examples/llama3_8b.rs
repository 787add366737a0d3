//! Pretrains a Llama on text, in any parallel layout, and generates a sample.
//!
//! With GPUs (`--features cuda`) it trains Llama 3 8B in bf16 with a sequence length of 8,192, or the largest Llama 3 that
//! fits, in the layout that the planner finds fastest. Without GPUs the model is scaled down until a laptop trains it in
//! minutes on CPU ranks, with the same parallel layouts, data path, optimizer and schedule.
//!
//! ```text
//! cargo run --release --example llama3_8b
//! cargo run --release --example llama3_8b -- --tensor-parallel 4 --data-parallel 1 --data book.txt --out runs/tp4
//! cargo run --release --example llama3_8b --features cuda
//! ```

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Result, bail};
use backend_dist::gpu::GpuInfo;
use backend_dist::mesh::Axis;
use backend_dist::process::Cluster;
use burn::tensor::FloatDType;
use burn_megatron::cli::device::DeviceKind;
use burn_megatron::cli::layout::LayoutArgs;
use burn_megatron::data::preprocess::TokenizerChoice;
use burn_megatron::hf::HfFolder;
use burn_megatron::prelude::*;
use burn_megatron::schedule::PipelineConfig;
use clap::Parser;
use examples::machine::{self, Task};
use examples::{Text, at_least_one, repository_text, small_llama, tell};

/// Pretrains Llama 3 8B, or a smaller model that fits this machine, on the repository's own text or on yours.
#[derive(Parser)]
struct Args {
    /// Training text, .txt or .jsonl [default: the repository's own sources and documents]
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// Hugging Face folder of a Llama to continue training: its sizes, weights and tokenizer
    #[arg(long, value_name = "DIR")]
    hf: Option<PathBuf>,
    /// tokenizer.json [default: a small tokenizer is trained on the text]
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    /// Number of GPUs; 0: CPU ranks [default: all]
    #[arg(long, value_name = "N")]
    gpus: Option<usize>,
    /// Optimizer steps [default: 600; on GPUs 200]
    #[arg(long, value_parser = at_least_one)]
    steps: Option<usize>,
    /// Sequence length [default: 128; on GPUs 8192]
    #[arg(long)]
    seq_length: Option<usize>,
    /// Sequences per micro-batch [default: 8; on GPUs chosen by the planner]
    #[arg(long)]
    micro_batch: Option<usize>,
    /// Sequences per optimizer step over all ranks [default: 16; on GPUs 8]
    #[arg(long)]
    global_batch: Option<usize>,
    /// Maximum learning rate [default: 3e-3; on GPUs 3e-4]
    #[arg(long)]
    lr: Option<f64>,
    /// Steps between checkpoints [default: 200; on GPUs none are saved]
    #[arg(long)]
    checkpoint_every: Option<u64>,
    /// Resume from the newest checkpoint, in this layout or any other
    #[arg(long)]
    resume: bool,
    /// Output folder
    #[arg(long, default_value = "runs/llama3_8b")]
    out: PathBuf,
    #[command(flatten)]
    layout: LayoutArgs,
}

/// The model and its batch.
struct Setting {
    /// Sizes; a small model gets the vocabulary of the text.
    config: LlamaConfig,
    layout: ParallelLayout,
    pipeline: PipelineConfig,
    recompute: Recompute,
    dtype: FloatDType,
    steps: usize,
    seq_length: usize,
    micro_batch: usize,
    global_batch: usize,
    lr: f64,
    on_gpus: bool,
    checkpoint_every: Option<u64>,
}

fn on_cpu(args: &Args, folder: Option<&LlamaConfig>) -> Result<Setting> {
    let layout = args.layout.over(ParallelLayout { tp: 2, sp: true, dp: 2, ..Default::default() })?;
    Ok(Setting {
        config: folder.cloned().unwrap_or_else(small_llama),
        layout,
        pipeline: PipelineConfig::default(),
        recompute: Recompute::default(),
        dtype: FloatDType::F32,
        steps: args.steps.unwrap_or(600),
        seq_length: args.seq_length.unwrap_or(128),
        micro_batch: args.micro_batch.unwrap_or(8),
        global_batch: args.global_batch.unwrap_or(16),
        lr: args.lr.unwrap_or(3e-3),
        on_gpus: false,
        checkpoint_every: args.checkpoint_every.or(Some(200)),
    })
}

fn on_gpus(args: &Args, folder: Option<&LlamaConfig>, gpus: &[GpuInfo]) -> Result<Setting> {
    let (seq_length, micro_batch) = (args.seq_length.unwrap_or(8192), args.micro_batch);
    let llamas = [
        ("Llama 3 8B", LlamaConfig::llama3_8b()),
        ("Llama 3.2 3B", LlamaConfig::llama3_3b()),
        ("Llama 3.2 1B", LlamaConfig::llama3_1b()),
    ];
    let models = folder.map_or(llamas.to_vec(), |config| vec![("the folder's model", config.clone())]);
    let (layout, global_batch) = (&args.layout, args.global_batch);
    let gpus_used = args.gpus.unwrap_or(gpus.len());
    let choice =
        machine::choose(gpus, &Task { models, layout, gpus: gpus_used, seq_length, micro_batch, global_batch })?;
    choice.why.lines().for_each(tell);
    Ok(Setting {
        config: choice.config,
        layout: choice.layout,
        pipeline: choice.pipeline,
        recompute: choice.recompute,
        dtype: FloatDType::BF16,
        steps: args.steps.unwrap_or(200),
        seq_length,
        micro_batch: choice.micro_batch,
        global_batch: choice.global_batch,
        lr: args.lr.unwrap_or(3e-4),
        on_gpus: true,
        checkpoint_every: args.checkpoint_every,
    })
}

/// Optimizer and schedule of Llama 3: AdamW, a warm-up and a cosine decay, gradient clipping at 1.
fn recipe(setting: &Setting) -> EngineConfig {
    let steps = setting.steps as u64;
    let lr = LrConfig {
        max: setting.lr,
        min: setting.lr / 10.0,
        init: 0.0,
        warmup: Span::Steps(steps / 20),
        decay: Span::Steps(steps),
        form: LrDecay::Cosine,
    };
    EngineConfig {
        optimizer: AdamWConfig { beta2: 0.95, weight_decay: 0.1, ..AdamWConfig::default() }.into(),
        clip: Some(1.0),
        seed: 1234,
        pipeline: setting.pipeline.clone(),
        recompute: setting.recompute.clone(),
        ..EngineConfig::new(setting.micro_batch, setting.global_batch, lr)
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    examples::together(|cluster| train(args, cluster))
}

fn train(args: Args, cluster: &Cluster) -> Result<()> {
    let folder = args.hf.as_ref().map(|path| HfFolder::open(path).map(Arc::new)).transpose()?;
    let sizes = match folder.as_ref().map(|folder| folder.config()) {
        Some(FamilyConfig::Llama(config)) => Some(config),
        Some(other) => bail!("--hf: a model of family {}, but this example trains llama", other.family()),
        None => None,
    };
    let found = if args.gpus == Some(0) { Err("--gpus 0".to_string()) } else { machine::gpus() };
    let setting = match (&found, args.gpus) {
        (Ok(gpus), _) => on_gpus(&args, sizes, gpus)?,
        (Err(why), Some(1..)) => bail!("--gpus: {why}"),
        (Err(_), _) => on_cpu(&args, sizes)?,
    };
    let (recipe, layout) = (recipe(&setting), setting.layout.clone());
    // Errors are found before the first file is written.
    setting.config.dims().check(&layout, setting.seq_length)?;
    recipe.plan(layout.dp)?;
    recipe.lr.schedule(setting.global_batch)?;
    let saved = args.out.join("checkpoints");
    if !args.resume && saved.is_dir() && !Checkpoint::list(&saved)?.is_empty() {
        bail!("{} has checkpoints: continue with --resume, or name another folder with --out", saved.display());
    }

    let files = match &args.data {
        Some(file) => vec![file.clone()],
        None => repository_text().map_err(anyhow::Error::msg)?,
    };
    let given = args.tokenizer.or_else(|| folder.as_ref().and_then(|folder| folder.tokenizer_path()));
    let own = TokenizerChoice::TrainBpe(if setting.on_gpus { 8192 } else { 1024 });
    let tokenizer = given.clone().map_or(own, TokenizerChoice::File);
    let samples = setting.steps * setting.global_batch;
    let text = Text::prepare(files, &args.out, tokenizer, (setting.seq_length, samples), cluster)?;
    // A small model gets the vocabulary of the text, a model with published sizes keeps its own.
    let own_vocabulary = setting.on_gpus || folder.is_some();
    let vocab_size = if own_vocabulary { setting.config.vocab_size } else { text.vocab_size };
    if text.vocab_size > vocab_size {
        bail!("the tokenizer has {} entries, but the model has a vocabulary of {vocab_size}", text.vocab_size);
    }
    let config = LlamaConfig { vocab_size, ..setting.config.clone() };
    if let Err(why) = &found {
        let millions = config.parameter_count() as f64 / 1e6;
        let what = if folder.is_some() { "the folder's Llama" } else { "Llama 3 8B scaled down to" };
        let ranks = layout.world_size();
        tell(format_args!("{why}: {what} {millions:.1} million parameters, on {ranks} CPU ranks, {layout}"));
    }
    tell(format_args!("text: {} documents, {} tokens, vocabulary {}", text.documents, text.tokens, text.vocab_size));
    let saves = setting.checkpoint_every.is_some() || args.resume;
    if setting.on_gpus {
        let hints = machine::hints(given.is_none().then_some(text.vocab_size), vocab_size, saves);
        hints.lines().for_each(tell);
    }

    let (prompt, held_out) = (text.encode("/// The ")?, text.valid.clone());
    let window = Some(setting.seq_length);
    let writing = GenerateOptions { window, ..GenerateOptions::new(100, Sampling::default()) };
    let saver = SaverOptions {
        keep_last: Some(2),
        background: true,
        tokenizer: Some(text.tokenizer_path.clone()),
        ..Default::default()
    };
    let description = Description {
        model: serde_json::to_value(FamilyConfig::Llama(config.clone()))?,
        config: serde_json::to_value(&recipe)?,
        ..Description::default()
    };
    let data = (text.train.clone(), text.valid.clone());
    let (dims, dtype, writes) = (config.dims(), setting.dtype, !setting.on_gpus);
    let (sizes, recompute, weights) = (config.clone(), setting.recompute.clone(), folder.clone());
    let kind = if setting.on_gpus { DeviceKind::Cuda } else { DeviceKind::Cpu };
    let mesh = Mesh::new(layout)?;
    let processes = cluster.processes(&mesh)?;
    let devices = processes.attempt(|| kind.devices_among(&processes))?;
    let flops = setting.on_gpus.then(|| machine::flops(&config, setting.seq_length, &devices));
    let mut run = Pretraining::new(mesh, recipe, setting.steps, data, dims, move |rank, part| {
        let params = ParamBuilder::new(rank, dtype, 1234).with_part(part).with_recompute(&recompute);
        let params = params.with_dp_ranks(rank.group(Axis::DpCp));
        Ok(match &weights {
            Some(weights) => Llama::build(&config, params.with_source(&**weights))?,
            None => Llama::build(&config, params)?,
        })
    })
    .processes(processes)
    .devices(devices)
    .directory(&args.out)
    .logs(LogOptions { flops, ..LogOptions::default() })
    .resume(if args.resume { Resume::IfPresent } else { Resume::Never })
    .describe(description);
    if saves {
        let (root, every) = (args.out.join("checkpoints"), setting.checkpoint_every.into());
        run = run.checkpoints(CheckpointOptions { root, every, saver });
    }
    if setting.on_gpus {
        run = run.evaluate(setting.steps.div_ceil(4), 1);
    }
    let run = run.finish(move |rank, engine| {
        let loss = loss_over(engine, &held_out)?.loss;
        if !writes {
            return Ok((loss, Vec::new()));
        }
        let params = ParamBuilder::new(rank, dtype, 1234).without_autodiff();
        let model = engine.fill(Llama::build(&sizes, params)?);
        // The data-parallel ranks hold the same model: one of them generates.
        let written = match rank.coords.dp {
            0 => generate(rank, &model, &prompt, &writing, |_| ControlFlow::Continue(()))?.tokens,
            _ => Vec::new(),
        };
        Ok((loss, [prompt.clone(), written].concat()))
    });

    let Some((loss, sample)) = examples::pretrain(&run, cluster)? else { return Ok(()) };
    println!("\nheld-out text: loss {loss:.4}, perplexity {:.1}", loss.exp());
    if writes {
        println!("a sample of the model:\n{}\n", text.decode(&sample)?);
    }
    let out = args.out.display();
    println!(
        "written to {out}: tokenizer and tokens, steps.jsonl, metrics per epoch, and checkpoints where they were saved"
    );
    if saves {
        println!(
            "  generate more:  cargo run --release -- generate --checkpoint {out}/checkpoints --prompt \"/// The \""
        );
    }
    Ok(())
}
