//! `burn-megatron verify`: does every layout train like one device?

use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, bail};
use clap::ValueEnum;
use models::{CausalLm, Gpt, GptConfig, Llama, LlamaConfig, LlamaVariant, ModelConfig};

use super::device::Place;
use crate::engine::{runnable, together};
use crate::verify::{Candidate, Row, Settings, TOLERANCE, candidates, verify};

/// The model families that can be verified.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Family {
    /// RMSNorm, rotary positions, SwiGLU, grouped queries
    Llama,
    /// Llama with a sliding window of a quarter of the row
    Mistral,
    /// Llama with norms of every query and key head
    Qwen3,
    /// LayerNorm, learned positions, GELU, biases, dropout, tied output
    Gpt,
}

/// Arguments of `verify`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Model family
    #[arg(long, value_enum, default_value = "llama")]
    model: Family,
    /// Transformer layers
    #[arg(long, value_name = "N", default_value_t = 2)]
    layers: usize,
    /// Width
    #[arg(long, value_name = "N", default_value_t = 32)]
    hidden: usize,
    /// Inner width of the MLP
    #[arg(long, value_name = "N", default_value_t = 64)]
    ffn: usize,
    /// Attention heads
    #[arg(long, value_name = "N", default_value_t = 4)]
    heads: usize,
    /// Key/value heads (Llama)
    #[arg(long, value_name = "N", default_value_t = 2)]
    kv_heads: usize,
    /// Tokens of the vocabulary
    #[arg(long, value_name = "N", default_value_t = 101)]
    vocab: usize,
    /// Share of dropped activations (GPT)
    #[arg(long, value_name = "P", default_value_t = 0.1)]
    dropout: f64,
    /// Tokens per row
    #[arg(long, value_name = "N", default_value_t = 16)]
    seq_length: usize,
    /// Rows per optimizer step
    #[arg(long, value_name = "N", default_value_t = 8)]
    global_batch: usize,
    /// Optimizer steps
    #[arg(long, value_name = "N", default_value_t = 3)]
    steps: usize,
    /// Where the layouts run; the one device they are compared with is always a CPU
    #[arg(long, value_enum, default_value = "cpu")]
    device: Place,
    /// Most ranks (threads) of a layout
    #[arg(long, value_name = "N", default_value_t = 4)]
    ranks: usize,
    /// A layout to try; may be given several times. For example "TP2 SP DP2 ZeRO1 x2" (x2: two micro-batches) or
    /// "PP2 VPP2 DP2 x4 interleaved Et|t|t|tL uniform1" (schedule, Megatron's layout string, recomputation: selective,
    /// uniformN or blockN). Without it: every TP x SP x PP x VPP x DP x ZeRO x schedule x micro-batches that model and
    /// ranks allow, with all ways to recompute in turn
    #[arg(long = "layout", value_name = "LAYOUT")]
    layouts: Vec<String>,
    /// Largest relative difference that passes
    #[arg(long, value_name = "X", default_value_t = TOLERANCE)]
    tolerance: f64,
    /// Seed of weights, tokens and dropout
    #[arg(long, value_name = "N", default_value_t = 1234)]
    seed: u64,
}

/// Prints the table; the exit code is 1 where a layout differs by more than rounding.
///
/// # Errors
/// If the model or a layout cannot be run.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.model {
        Family::Llama => run_model::<Llama>(&args, &llama(&args, LlamaVariant::Llama)),
        Family::Mistral => run_model::<Llama>(&args, &llama(&args, LlamaVariant::Mistral)),
        Family::Qwen3 => run_model::<Llama>(&args, &llama(&args, LlamaVariant::Qwen3)),
        Family::Gpt => run_model::<Gpt>(&args, &gpt(&args)),
    }
}

fn llama(args: &Args, variant: LlamaVariant) -> LlamaConfig {
    let window = (args.seq_length / 4).max(1);
    LlamaConfig {
        variant,
        sliding_window: (variant == LlamaVariant::Mistral).then_some(window),
        vocab_size: args.vocab,
        hidden_size: args.hidden,
        intermediate_size: args.ffn,
        num_hidden_layers: args.layers,
        num_attention_heads: args.heads,
        num_key_value_heads: args.kv_heads,
        head_dim: args.hidden / args.heads.max(1),
        ..LlamaConfig::tiny()
    }
}

fn gpt(args: &Args) -> GptConfig {
    GptConfig {
        vocab_size: args.vocab,
        max_position_embeddings: args.seq_length,
        hidden_size: args.hidden,
        intermediate_size: args.ffn,
        num_hidden_layers: args.layers,
        num_attention_heads: args.heads,
        hidden_dropout: args.dropout,
        ..GptConfig::tiny()
    }
}

fn run_model<M: CausalLm>(args: &Args, config: &M::Config) -> anyhow::Result<ExitCode> {
    let settings = Settings {
        steps: args.steps,
        global_batch: args.global_batch,
        seq: args.seq_length,
        seed: args.seed,
        tolerance: args.tolerance,
    };
    let list = layouts(args, config)?;
    if list.is_empty() || args.steps == 0 {
        bail!("nothing to verify: {} layouts, {} steps", list.len(), args.steps);
    }
    println!(
        "{:?}: {} layers, width {}, vocabulary {}; {} steps of {} x {} tokens in f64; worst relative difference to one device",
        args.model, args.layers, args.hidden, args.vocab, args.steps, args.global_batch, args.seq_length
    );
    println!("{}", Row::heading());
    let most = list.iter().map(|candidate| candidate.layout.world_size()).max().unwrap_or(1);
    let start = Instant::now();
    let devices = args.device.devices(most);
    let rows = verify::<M>(config, &settings, &devices, &list, |row| println!("{row}"))?;
    let equal = rows.iter().filter(|row| row.passes()).count();
    let (all, seconds) = (rows.len(), start.elapsed().as_secs_f64());
    println!("{equal} of {all} layouts equal one device within {:.0e} ({seconds:.1} s)", args.tolerance);
    Ok(if equal == all { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The layouts of the flags, each checked, or all that fit.
fn layouts(args: &Args, config: &impl ModelConfig) -> anyhow::Result<Vec<Candidate>> {
    let dims = config.dims();
    if args.layouts.is_empty() {
        dims.check(&Default::default(), args.seq_length)?;
        return Ok(candidates(args.ranks, args.global_batch, dims.layers, |layout| {
            dims.check(layout, args.seq_length).is_ok()
        }));
    }
    let parse = |text: &String| -> anyhow::Result<Candidate> {
        let candidate: Candidate = text.parse().with_context(|| format!("--layout \"{text}\""))?;
        runnable(&candidate.layout)?;
        dims.check(&candidate.layout, args.seq_length)?;
        let (schedule, _) = candidate.pipeline.resolve(&candidate.layout, dims.layers, candidate.accumulation)?;
        together(&candidate.layout, schedule.kind)?;
        let parts = candidate.layout.dp * candidate.accumulation;
        if !args.global_batch.is_multiple_of(parts) {
            bail!(
                "--layout \"{text}\" cuts a step into {parts} parts, --global-batch {} is not a multiple",
                args.global_batch
            );
        }
        Ok(candidate)
    };
    args.layouts.iter().map(parse).collect()
}
