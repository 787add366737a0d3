//! `burn-megatron verify`: does every layout train like one device?

mod model;

use std::fmt;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, bail};
use backend_dist::mesh::ParallelLayout;
use burn::tensor::Device;
use clap::ValueEnum;
use models::{CausalLm, DeepSeekV3, Gpt, Llama, LlamaVariant, Mixtral, MixtralVariant, ModelConfig};

use self::model::{Family, Size, Sizes, deepseek_v3, gpt, llama, mixtral};
use super::device::Place;
use super::processes::alone;
use crate::config::Precision;
use crate::console::say;
use crate::engine::ContextConfig;
use crate::verify::{Bounds, Candidate, Row, Settings, candidates, curve, verify};

/// Arguments of `verify`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Model family
    #[arg(long, value_enum, default_value = "llama")]
    model: Family,
    /// Precision of the layouts; the one device they are compared with computes in f64 from the same rounded weights
    #[arg(long, value_enum, default_value = "f64")]
    dtype: Precision,
    /// Sizes of the model and its batches where no flag gives them. Without it: `kernels` in bf16, else `tiny`
    #[arg(long, value_enum)]
    size: Option<Size>,
    /// Transformer layers [default: 2]
    #[arg(long, value_name = "N")]
    layers: Option<usize>,
    /// Width
    #[arg(long, value_name = "N")]
    hidden: Option<usize>,
    /// Inner width of the MLP
    #[arg(long, value_name = "N")]
    ffn: Option<usize>,
    /// Attention heads
    #[arg(long, value_name = "N")]
    heads: Option<usize>,
    /// Key/value heads (Llama)
    #[arg(long, value_name = "N")]
    kv_heads: Option<usize>,
    /// Tokens of the vocabulary
    #[arg(long, value_name = "N")]
    vocab: Option<usize>,
    /// Share of dropped activations and attention weights (GPT)
    #[arg(long, value_name = "P", default_value_t = 0.1)]
    dropout: f64,
    /// Tokens per row
    #[arg(long, value_name = "N")]
    seq_length: Option<usize>,
    /// Rows per optimizer step
    #[arg(long, value_name = "N", default_value_t = 8)]
    global_batch: usize,
    /// Optimizer steps [default: 3; in bf16 1, and no other number]
    #[arg(long, value_name = "N")]
    steps: Option<usize>,
    /// Compare nothing but the losses of N steps, the same precision (f32 unless --dtype says f64) on one CPU device and in
    /// each --layout (one rank without)
    #[arg(long, value_name = "N", conflicts_with_all = ["steps", "tolerance"])]
    curve: Option<usize>,
    /// Where the layouts run; the one device they are compared with is always a CPU
    #[arg(long, value_enum, default_value = "cpu")]
    device: Place,
    /// Layouts of more ranks than there are GPUs share them, their exchanges going through the host
    #[arg(long)]
    share_gpus: bool,
    /// Most ranks (threads) of a layout
    #[arg(long, value_name = "N", default_value_t = 4)]
    ranks: usize,
    /// A layout to try; may be given several times. For example "TP2 SP DP2 ZeRO1 x2" (x2: two micro-batches) or
    /// "PP2 VPP2 DP2 x4 interleaved Et|t|t|tL uniform1" (schedule, Megatron's layout string, recomputation: selective,
    /// uniformN or blockN), or "TP2 CP4 a2a+p2p:2" (how context parallel ranks compute attention: p2p, all_gather, a2a,
    /// a2a+p2p:N in blocks of N; one a layer with commas). Without it: every TP x SP x CP x PP x VPP x DP x ZeRO x schedule
    /// x micro-batches that model and ranks allow, with all ways to recompute and across context parallel ranks in turn
    #[arg(long = "layout", alias = "layouts", value_name = "LAYOUT")]
    layouts: Vec<String>,
    /// Of the layouts that are tried without --layout, only N, spread over the list
    #[arg(long, value_name = "N", conflicts_with_all = ["layouts", "curve"])]
    sample: Option<usize>,
    /// Largest relative difference that passes [default: 1e-10 in f64, 1e-5 in f32; in bf16 that of the gradients next to
    /// the loss, 4 x 2^-7, growing by 3 % with every layer; tokens then use the experts that they use in f64]
    #[arg(long, value_name = "X")]
    tolerance: Option<f64>,
    /// Seed of weights, tokens and dropout
    #[arg(long, value_name = "N", default_value_t = 1234)]
    seed: u64,
}

impl Args {
    fn sizes(&self) -> Sizes {
        let size = self.size.unwrap_or(if self.dtype == Precision::Bf16 { Size::Kernels } else { Size::Tiny });
        let [hidden, ffn, heads, kv_heads, vocab, seq] = match size {
            Size::Tiny => [32, 64, 4, 2, 101, 16],
            Size::Kernels => [256, 512, 4, 2, 512, 256],
        };
        Sizes {
            layers: self.layers.unwrap_or(2),
            hidden: self.hidden.unwrap_or(hidden),
            ffn: self.ffn.unwrap_or(ffn),
            heads: self.heads.unwrap_or(heads),
            kv_heads: self.kv_heads.unwrap_or(kv_heads),
            vocab: self.vocab.unwrap_or(vocab),
            seq: self.seq_length.unwrap_or(seq),
        }
    }

    /// What to train.
    fn settings(&self, seq: usize) -> anyhow::Result<Settings> {
        let steps = match (self.dtype, self.steps, self.curve) {
            (Precision::F16, ..) => bail!("--dtype f16 has no bounds; legal: f64, f32, bf16"),
            (Precision::Bf16, _, Some(_)) => {
                bail!("--curve compares f32 or f64 losses; bf16 ones differ by their rounding")
            }
            (Precision::Bf16, Some(steps), _) if steps != 1 => {
                bail!("--steps {steps} in bf16: after one step the weights differ by their rounding; nearest legal: 1")
            }
            (_, _, Some(0)) | (_, Some(0), _) => bail!("nothing to verify: 0 steps"),
            (_, _, Some(steps)) => steps,
            (Precision::Bf16, ..) => 1,
            (_, steps, None) => steps.unwrap_or(3),
        };
        // With one token to choose from every loss is 0.
        let vocab = self.sizes().vocab;
        for (flag, value, least) in
            [("seq-length", seq, 1), ("global-batch", self.global_batch, 1), ("vocab", vocab, 2)]
        {
            if value < least {
                bail!("nothing to verify: --{flag} {value}; nearest legal: {least}");
            }
        }
        Ok(Settings {
            steps,
            global_batch: self.global_batch,
            seq,
            seed: self.seed,
            dtype: self.dtype.into(),
            tolerance: self.tolerance,
        })
    }
}

/// Prints the table; the exit code is 1 where a layout differs by more than rounding.
///
/// # Errors
/// If the model or a layout cannot be run.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    alone("verify")?;
    let sizes = args.sizes();
    match args.model {
        Family::Llama => run_model::<Llama>(&args, &sizes, &llama(&sizes, LlamaVariant::Llama)),
        Family::Mistral => run_model::<Llama>(&args, &sizes, &llama(&sizes, LlamaVariant::Mistral)),
        Family::Qwen3 => run_model::<Llama>(&args, &sizes, &llama(&sizes, LlamaVariant::Qwen3)),
        Family::Mixtral => run_model::<Mixtral>(&args, &sizes, &mixtral(&sizes, MixtralVariant::Mixtral)),
        Family::Qwen3Moe => run_model::<Mixtral>(&args, &sizes, &mixtral(&sizes, MixtralVariant::Qwen3Moe)),
        Family::DeepSeekV3 => run_model::<DeepSeekV3>(&args, &sizes, &deepseek_v3(&sizes)),
        Family::Gpt => run_model::<Gpt>(&args, &sizes, &gpt(&sizes, args.dropout)),
    }
}

fn run_model<M: CausalLm>(args: &Args, sizes: &Sizes, config: &M::Config) -> anyhow::Result<ExitCode> {
    let settings = args.settings(sizes.seq)?;
    if args.curve.is_some() {
        return run_curve::<M>(args, config, &settings);
    }
    let list = layouts(args, config, &settings)?;
    let devices = devices(args, &list)?;
    say(format_args!(
        "{:?}: {} layers, width {}, vocabulary {}; {} of {} x {} tokens in {}; worst relative difference to one CPU device \
         in f64",
        args.model,
        sizes.layers,
        sizes.hidden,
        sizes.vocab,
        if settings.steps == 1 { "1 step".into() } else { format!("{} steps", settings.steps) },
        args.global_batch,
        sizes.seq,
        Words(args.dtype)
    ));
    say(Row::heading());
    let start = Instant::now();
    let rows = verify::<M>(config, &settings, &devices, &list, |row| say(row))?;
    let equal = rows.iter().filter(|row| row.passes()).count();
    let (all, seconds) = (rows.len(), start.elapsed().as_secs_f64());
    let bounds = Bounds::new(settings.dtype, settings.tolerance, sizes.layers);
    say(format_args!("{equal} of {all} layouts equal one device within {bounds} ({seconds:.1} s)"));
    let rerouted = rows.iter().map(|row| row.rerouted).fold(0.0, f64::max);
    if rerouted > 0.0 {
        say(format_args!(
            "tokens used the experts that they use in f64; up to {:.1} % of the choices would have been others",
            100.0 * rerouted
        ));
    }
    Ok(if equal == all { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Prints a line per layout.
fn run_curve<M: CausalLm>(args: &Args, config: &M::Config, settings: &Settings) -> anyhow::Result<ExitCode> {
    let list = match args.layouts.is_empty() {
        true => vec![Candidate::default()],
        false => layouts(args, config, settings)?,
    };
    let devices = devices(args, &list)?;
    let mut equal = true;
    for candidate in &list {
        let curve = curve::<M>(config, settings, &devices, candidate)?;
        say(format_args!("{candidate} on {}, {}: {curve}", Words(args.device), Words(args.dtype)));
        equal &= curve.passes();
    }
    Ok(if equal { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A device for each rank of the largest layout, or all there are.
fn devices(args: &Args, list: &[Candidate]) -> anyhow::Result<Vec<Device>> {
    let largest = list.iter().map(|candidate| &candidate.layout).max_by_key(|layout| layout.world_size());
    match largest {
        Some(layout) if !args.share_gpus => args.device.devices(layout),
        _ => args.device.shared(),
    }
}

/// `count` elements of the list at equal distances, or all.
fn spread<T>(list: Vec<T>, count: usize) -> Vec<T> {
    let all = list.len();
    let is_taken = |index: usize| count >= all || (index * count) / all != ((index + 1) * count) / all;
    list.into_iter().enumerate().filter(|(index, _)| is_taken(*index)).map(|(_, element)| element).collect()
}

/// A flag's value as it is written.
struct Words<T: ValueEnum>(T);

impl<T: ValueEnum> fmt::Display for Words<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.to_possible_value().map_or(Ok(()), |value| f.write_str(value.get_name()))
    }
}

/// The layouts of the flags, each checked, or all that fit.
fn layouts(args: &Args, config: &impl ModelConfig, settings: &Settings) -> anyhow::Result<Vec<Candidate>> {
    let (dims, seq) = (config.dims(), settings.seq);
    if args.layouts.is_empty() {
        dims.check(&Default::default(), seq)?;
        let fits = |layout: &ParallelLayout, context: &ContextConfig| {
            dims.check(layout, seq).is_ok() && context.check(layout, &dims).is_ok()
        };
        let list = candidates(args.ranks, args.global_batch, dims.layers, dims.experts.is_some(), fits);
        if list.is_empty() {
            bail!("nothing to verify: no layout of up to {} ranks fits", args.ranks);
        }
        if args.sample == Some(0) {
            bail!("nothing to verify: --sample 0; nearest legal: 1");
        }
        return Ok(spread(list, args.sample.unwrap_or(usize::MAX)));
    }
    let parse = |text: &String| -> anyhow::Result<Candidate> {
        let candidate: Candidate = text.parse().with_context(|| format!("--layout \"{text}\""))?;
        candidate.layout.check()?;
        dims.check(&candidate.layout, seq)?;
        candidate.context.check(&candidate.layout, &dims)?;
        candidate.pipeline.resolve(&candidate.layout, dims.layers, candidate.accumulation)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_spread_over_the_list() {
        assert_eq!(spread((0..10).collect(), 3), [3, 6, 9]);
        assert_eq!(spread((0..10).collect(), 20).len(), 10);
        for count in 0..=10 {
            assert_eq!(spread((0..10).collect::<Vec<_>>(), count).len(), count);
        }
    }
}
