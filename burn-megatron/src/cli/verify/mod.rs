//! `burn-megatron verify`: does every layout train like one device?

mod curves;
mod flags;
mod layouts;
mod module;

use std::fmt;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::bail;
use backend_dist::ops::fp8::Fp8Recipe;
use backend_dist::process::Cluster;
use models::family::SampleSizes;
use models::{CausalLm, FamilyConfig, WithModel};

use self::curves::run_curve;
use self::flags::{Adapters, Base, Format, MODULES, Scaling, Size, Words, model, models, ranks, tolerance};
use self::layouts::{Layouts, layouts};
use super::device::DeviceKind;
use super::processes::tell;
use crate::config::Precision;
use crate::verify::{Bounds, Candidate, Line, Settings, verify};

/// Arguments of `verify`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Model family
    #[arg(long, value_parser = models(), default_value = "llama")]
    model: String,
    /// Precision of the layouts; the one device they are compared with computes in f64 from the same rounded weights
    #[arg(long, value_enum, default_value = "f64")]
    dtype: Precision,
    /// Linear layers of the blocks and experts in FP8, emulated in f64 on CPU ranks. A scale is that of a micro-batch,
    /// so the one device takes as many micro-batches as all data-parallel ranks; layouts that compute other numbers by
    /// design (docs/fp8.md) are left out, and counted
    #[arg(long, value_enum, value_name = "FORMAT", num_args = 0..=1, default_missing_value = "hybrid", conflicts_with = "curve")]
    fp8: Option<Format>,
    /// What has a scale of its own with --fp8
    #[arg(long, value_enum, value_name = "RECIPE", default_value = "tensorwise", requires = "fp8")]
    fp8_recipe: Scaling,
    /// Train adapters of rank 16 of all linear layers, of routed experts too, everything else frozen
    #[arg(long, value_enum, value_name = "KIND", num_args = 0..=1, default_missing_value = "lora", conflicts_with = "curve")]
    lora: Option<Adapters>,
    /// Store the frozen weights of linear layers in few bits, on the one device too. Layouts in which a rank has no whole
    /// blocks are left out, and counted
    #[arg(long, value_enum, value_name = "FORMAT", requires = "lora")]
    lora_base: Option<Base>,
    /// Sizes of the model and its batches where no flag gives them. Without it: `kernels` in bf16, `wide` in FP8, `fp8-blocks`
    /// if that is blockwise, `blocks` with --lora-base, else `tiny`
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
    /// Key/value heads (Llama, LLaVA)
    #[arg(long, value_name = "N")]
    kv_heads: Option<usize>,
    /// Tokens of the vocabulary
    #[arg(long, value_name = "N")]
    vocab: Option<usize>,
    /// Share of dropped activations and attention weights (GPT)
    #[arg(long, value_name = "P", default_value_t = 0.1)]
    dropout: f64,
    /// Tokens of a sequence
    #[arg(long, value_name = "N")]
    seq_length: Option<usize>,
    /// Sequences per optimizer step
    #[arg(long, value_name = "N", default_value_t = 8)]
    global_batch: usize,
    /// Optimizer steps [default: 3; in bf16 1, and no other number]
    #[arg(long, value_name = "N")]
    steps: Option<usize>,
    /// Compare nothing but the losses of N steps, the same precision (f32 unless --dtype says f64) on one CPU device
    /// and in each --layout (one rank without)
    #[arg(long, value_name = "N", conflicts_with_all = ["steps", "tolerance"])]
    curve: Option<usize>,
    /// Where the layouts run; the one device they are compared with is always a CPU
    #[arg(long, value_enum, default_value = "cpu")]
    pub(super) device: DeviceKind,
    /// Layouts of more ranks than there are GPUs share them, their collectives going through the host
    #[arg(long)]
    share_gpus: bool,
    /// Most ranks (threads) of a layout that is tried without --layout, 1 to 256
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = ranks)]
    ranks: usize,
    /// A layout to try; may be given several times. For example "TP2 SP DP2 ZeRO1 x2" (x2: two micro-batches) or
    /// "PP2 VPP2 DP2 x4 interleaved Et|t|t|tL uniform1" (of --layers 4; schedule, Megatron's layout string, recomputation: selective,
    /// uniformN or blockN), or "TP2 CP4 a2a+p2p:2" (how context parallel ranks compute attention: p2p, all_gather, a2a,
    /// a2a+p2p:N in blocks of N; one a layer with commas). Without it: every TP x SP x CP x PP x VPP x DP x ZeRO x
    /// schedule x micro-batches that model and ranks allow, with all kinds of recomputation, of attention over context
    /// parallel ranks and of expert layouts in turn, and every two options together
    #[arg(long = "layout", alias = "layouts", value_name = "LAYOUT")]
    layouts: Vec<String>,
    /// Of the layouts that are tried without --layout, only N, spread over the list
    #[arg(long, value_name = "N", conflicts_with_all = ["layouts", "curve"])]
    sample: Option<usize>,
    /// Instead of all layouts a short list of up to 8 ranks in which every two options meet
    #[arg(long, conflicts_with_all = ["layouts", "curve", "sample"])]
    pairwise: bool,
    /// Largest relative difference that passes [default: 1e-10 in f64, 1e-5 in f32; in bf16 that of the gradients next
    /// to the loss, 4 x 2^-7, growing by 3 % with every layer; tokens then use the experts that they use in f64]
    #[arg(long, value_name = "X", value_parser = tolerance, allow_negative_numbers = true)]
    tolerance: Option<f64>,
    /// Seed of weights, tokens and dropout
    #[arg(long, value_name = "N", default_value_t = 1234)]
    seed: u64,
}

impl Args {
    fn sizes(&self) -> SampleSizes {
        let size = self.size.unwrap_or(match (self.dtype, self.fp8, self.lora_base) {
            (Precision::Bf16, ..) => Size::Kernels,
            (_, Some(_), None) if self.fp8_recipe == Scaling::Blockwise => Size::Fp8Blocks,
            (_, Some(_), None) => Size::Wide,
            (_, _, Some(_)) => Size::Blocks,
            (_, None, None) => Size::Tiny,
        });
        let [hidden, ffn, heads, kv_heads, vocab, seq] = size.of();
        SampleSizes {
            layers: self.layers.unwrap_or(2),
            hidden: self.hidden.unwrap_or(hidden),
            intermediate: self.ffn.unwrap_or(ffn),
            heads: self.heads.unwrap_or(heads),
            kv_heads: self.kv_heads.unwrap_or(kv_heads),
            vocab: self.vocab.unwrap_or(vocab),
            seq: self.seq_length.unwrap_or(seq),
            dropout: self.dropout,
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
        if let (Some(format), true) = (self.fp8, self.dtype != Precision::F64) {
            bail!(
                "--fp8 {} with --dtype {}: a rounding difference moves a value to the next FP8 number, a sixteenth away, too often \
                 to compare layouts below f64; nearest legal: --dtype f64",
                Words(format),
                Words(self.dtype)
            );
        }
        if let (Some(format), DeviceKind::Cuda) = (self.fp8, self.device) {
            bail!(
                "--fp8 {} with --device cuda: GPUs have no FP8 next to f64; on CPU ranks it is emulated; nearest legal: --device cpu \
                 (`doctor --kernels` compares the GPU's GEMMs with the emulation)",
                Words(format)
            );
        }
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
            fp8: self
                .fp8
                .map(|format| Fp8Recipe { scaling: self.fp8_recipe.of(), ..Fp8Recipe::tensorwise(format.of()) }),
            lora: self.lora.map(Adapters::of),
            base: self.lora_base.map(Base::of),
        })
    }
}

/// Prints the table; the exit code is 1 where a layout differs by more than rounding or fails. Fails if the model or a
/// layout is illegal, or the one device fails.
pub fn run(args: Args, cluster: &Cluster) -> anyhow::Result<ExitCode> {
    // `bench` and `replay` take lists.
    let is_list = |text: &&String| text.contains(',') && text.split(',').all(is_layout);
    if let Some(text) = args.layouts.iter().find(is_list) {
        bail!("--layout \"{text}\" is a list, or one layout with commas; give --layout for each, or blanks for commas");
    }
    if MODULES.iter().any(|(name, _)| *name == args.model) {
        return module::run(&args, cluster);
    }
    let sizes = args.sizes();
    let config = model(&args.model, &sizes);
    config.visit(Run { args: &args, sizes: &sizes, family: &config, cluster })
}

/// Whether a text with sizes of parallel axes is a layout by itself.
fn is_layout(text: &str) -> bool {
    text.trim().starts_with(|start: char| start.is_ascii_uppercase()) && text.parse::<Candidate>().is_ok()
}

struct Run<'a> {
    args: &'a Args,
    sizes: &'a SampleSizes,
    family: &'a FamilyConfig,
    cluster: &'a Cluster,
}

impl WithModel for Run<'_> {
    type Output = anyhow::Result<ExitCode>;

    fn with<M: CausalLm + 'static>(self, config: &M::Config) -> Self::Output {
        let settings = self.args.settings(self.sizes.seq)?;
        match self.args.curve {
            Some(_) => run_curve::<M>(&self, config, &settings),
            None => run_layouts::<M>(&self, config, &settings),
        }
    }
}

/// Prints a line per layout.
fn run_layouts<M: CausalLm>(run: &Run, config: &M::Config, settings: &Settings) -> anyhow::Result<ExitCode> {
    let Run { args, sizes, family, cluster } = *run;
    let Layouts { tried: list, left_out } = layouts(args, family, settings, cluster)?;
    let cluster = devices(args, &list, cluster)?;
    let say = |line: &dyn fmt::Display| tell(&cluster, line);
    say(&format_args!(
        "{}: {} layers, width {}, vocabulary {}; {} of {} x {} tokens in {}; worst relative difference to one CPU device \
         in f64{}",
        args.model,
        sizes.layers,
        sizes.hidden,
        sizes.vocab,
        if settings.steps == 1 { "1 step".into() } else { format!("{} steps", settings.steps) },
        args.global_batch,
        sizes.seq,
        Words(args.dtype),
        args.fp8.map_or(String::new(), |format| {
            format!(
                " and FP8 ({}, {}), with as many micro-batches as a layout and its data-parallel ranks",
                Words(format),
                Words(args.fp8_recipe)
            )
        })
    ));
    say(&Line::heading());
    let start = Instant::now();
    let lines = verify::<M>(config, settings, &cluster, &list, |line| say(line))?;
    let equal = lines.iter().filter(|line| line.passes()).count();
    let failed = lines.iter().filter(|line| line.failed()).count();
    let (all, seconds) = (lines.len(), start.elapsed().as_secs_f64());
    let bounds = Bounds::new(settings.dtype, settings.tolerance, sizes.layers);
    say(&format_args!("{equal} of {all} layouts equal one device within {bounds} ({seconds:.1} s)"));
    if failed > 0 {
        say(&format_args!("{failed} of {all} layouts failed before the last step"));
    }
    for (why, count) in left_out {
        say(&format_args!("left out: {count} ({why})"));
    }
    let rerouted = lines.iter().map(|line| line.rerouted).fold(0.0, f64::max);
    if rerouted > 0.0 {
        say(&format_args!(
            "tokens used the experts that they use in f64; up to {:.1} % of the choices would have been others",
            100.0 * rerouted
        ));
    }
    Ok(if equal == all { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A device for each rank of the largest layout, or all there are.
fn devices(args: &Args, list: &[Candidate], cluster: &Cluster) -> anyhow::Result<Cluster> {
    let largest = list.iter().map(|candidate| &candidate.layout).max_by_key(|layout| layout.world_size());
    match largest {
        Some(layout) if !args.share_gpus => args.device.of_cluster(layout, cluster),
        _ => args.device.shared(cluster),
    }
}
