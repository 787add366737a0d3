//! Continued pre-training: trains a model from a Hugging Face folder on other text and writes a Hugging Face folder.
//!
//! Without `--hf` it first trains a base model, a tiny Llama, on this repository's Rust code, so that the whole workflow
//! runs on any machine in a minute.
//!
//! ```text
//! cargo run --release --example finetune_hf
//! cargo run --release --example finetune_hf -- --hf Llama-3.2-1B --data book.txt --tensor-parallel 2
//! ```

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use backend_dist::gpu::gpus;
use backend_dist::mesh::{Mesh, ParallelLayout};
use backend_dist::process::Cluster;
use burn_megatron::checkpoint::Checkpoint;
use burn_megatron::cli::device::{DeviceChoice, DeviceKind};
use burn_megatron::cli::layout::LayoutArgs;
use burn_megatron::config::RunConfig;
use burn_megatron::hf::{CheckpointWeights, Export, Format, HfFolder, companions_of, export, model_of};
use burn_megatron::train::{Plan, TrainReport, train_among};
use clap::Parser;
use examples::{repository_text, tell};

/// Trains a model from a Hugging Face folder on a text and writes a Hugging Face folder.
#[derive(Parser)]
struct Args {
    /// Folder with config.json, safetensors files and tokenizer.json [default: a tiny model made on the spot]
    #[arg(long, value_name = "DIR")]
    hf: Option<PathBuf>,
    /// Training text [default: this repository's documents]
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// Optimizer steps
    #[arg(long, default_value_t = 100)]
    steps: usize,
    /// Sequence length
    #[arg(long, default_value_t = 128)]
    seq_length: usize,
    /// Maximum learning rate; for a large model about a tenth of its pre-training rate
    #[arg(long, default_value_t = 1e-3)]
    lr: f64,
    /// Device of the ranks
    #[arg(long, value_enum, default_value = "auto")]
    device: DeviceChoice,
    /// Output folder
    #[arg(long, default_value = "runs/finetune_hf")]
    out: PathBuf,
    #[command(flatten)]
    layout: LayoutArgs,
}

fn main() -> ExitCode {
    let args = Args::parse();
    examples::together(|cluster| run(args, cluster))
}

fn run(args: Args, cluster: &Cluster) -> Result<()> {
    let tp = default_ranks(args.device.kind());
    let layout = args.layout.over(ParallelLayout { tp, sp: tp > 1, ..Default::default() })?;
    if cluster.is_first() && args.out.exists() {
        bail!("{} exists already: remove it, or name another folder with --out", args.out.display());
    }
    let base = match &args.hf {
        Some(folder) => folder.clone(),
        None => make_base(&args, &layout, cluster)?,
    };
    let text = args.data.clone().map_or_else(|| repository_files("md"), |file| Ok(vec![file]))?;
    let loss_of_base = learn(&args, &layout, &base, &text, "before", (1, 0.0), cluster)?;
    let loss = learn(&args, &layout, &base, &text, "tuned", (args.steps, args.lr), cluster)?;
    let (true, Some(loss_of_base), Some(loss)) = (cluster.is_first(), loss_of_base, loss) else { return Ok(()) };
    let tuned = args.out.join("tuned-hf");
    write_folder(&args.out.join("tuned/checkpoints"), &tuned)?;

    println!("\nloss on held-out text: {loss_of_base:.4} before, {loss:.4} after {} steps", args.steps);
    println!("{} is a Hugging Face folder like {}. Generate text with it:", tuned.display(), base.display());
    println!("  cargo run --release -- generate --hf {} --prompt \"The layout\"", tuned.display());
    Ok(())
}

/// Two CPU ranks, or as many GPUs if there are so many.
fn default_ranks(device: DeviceKind) -> usize {
    match device {
        DeviceKind::Cpu => 2,
        DeviceKind::Cuda => gpus().map_or(1, |gpus| gpus.len().min(2)),
    }
}

/// Trains the model in `base` on `text` for some steps with a maximum learning rate, and returns its held-out loss in the
/// first process. One step at a rate of zero only measures the loss.
fn learn(
    args: &Args,
    layout: &ParallelLayout,
    base: &Path,
    text: &[PathBuf],
    name: &str,
    (steps, rate): (usize, f64),
    cluster: &Cluster,
) -> Result<Option<f64>> {
    let config = format!(
        "[model]\nhf = {base:?}\n{}[lr]\nmax = {rate}\nmin = {}\nwarmup = {}\n{}",
        training(args, layout, steps),
        rate / 10.0,
        steps / 10,
        data(text, "", args, name),
    );
    let last = start(name, &config, args.device.kind(), cluster)?.last;
    if !cluster.is_first() {
        return Ok(None);
    }
    Ok(Some(last.context("the text is too short to hold some out")?.loss))
}

/// A tiny Llama trained on this repository's Rust code, as a Hugging Face folder.
fn make_base(args: &Args, layout: &ParallelLayout, cluster: &Cluster) -> Result<PathBuf> {
    tell("no --hf: a tiny Llama is trained on this repository's Rust code first");
    let text = repository_files("rs")?;
    let config = format!(
        "[model]\npreset = \"tiny\"\nvocab-size = {VOCABULARY}\n{}[lr]\nmax = 3e-3\nmin = 3e-4\nwarmup = 20\n{}",
        training(args, layout, 200),
        data(&text, &format!("tokenizer = \"bpe\"\nbpe-size = {VOCABULARY}\n"), args, "base"),
    );
    start("base", &config, args.device.kind(), cluster)?;
    let folder = args.out.join("base-hf");
    cluster.first_then_others(|| match cluster.is_first() {
        true => write_folder(&args.out.join("base/checkpoints"), &folder),
        false => Ok(()),
    })?;
    Ok(folder)
}

/// Entries of the tokenizer of the tiny model.
const VOCABULARY: usize = 1024;

fn training(args: &Args, layout: &ParallelLayout, steps: usize) -> String {
    let (tp, sp, dp) = (layout.tp, layout.sp, layout.dp);
    let dtype = if args.device.kind() == DeviceKind::Cuda { "bf16" } else { "f32" };
    format!(
        "[parallel]\ntp = {tp}\nsp = {sp}\ndp = {dp}\n[training]\ndtype = \"{dtype}\"\nsteps = {steps}\nmicro-batch = 4\n\
         global-batch = {}\nseq-length = {}\n",
        8 * dp,
        args.seq_length
    )
}

fn data(text: &[PathBuf], tokenizer: &str, args: &Args, name: &str) -> String {
    format!("[data]\ntext = {text:?}\n{tokenizer}split = \"90,10\"\n[output]\ndirectory = {:?}\n", args.out.join(name))
}

/// Plans and trains.
fn start(name: &str, config: &str, device: DeviceKind, cluster: &Cluster) -> Result<TrainReport> {
    let config = RunConfig::parse(name, config, &[])?;
    let plan = Plan::new(&config, &[])?;
    tell(format_args!("\n{name}\n{plan}"));
    let processes = cluster.processes(&Mesh::new(config.parallel.clone())?)?;
    Ok(train_among(&plan, Some(&processes), device.devices_among(&processes)?, &mut |_| ())?)
}

/// Writes the newest checkpoint of a run as a Hugging Face folder, with the model's companion files.
fn write_folder(checkpoints: &Path, folder: &Path) -> Result<()> {
    let checkpoint = Checkpoint::open(checkpoints)?;
    checkpoint.verify(0, 1)?;
    let tokenizer = checkpoint.tokenizer();
    let what = Export {
        config: &model_of(&checkpoint)?,
        companions: &companions_of(&checkpoint)?,
        tokenizer: tokenizer.as_deref(),
        element: None,
        shard_bytes: 5_000_000_000,
        format: Format::Safetensors,
    };
    export(folder, &what, &CheckpointWeights::of(&checkpoint))?;
    HfFolder::open(folder)?;
    Ok(())
}

fn repository_files(kind: &str) -> Result<Vec<PathBuf>> {
    let mut files = repository_text().map_err(anyhow::Error::msg)?;
    files.retain(|file| file.extension().is_some_and(|extension| extension == kind));
    Ok(files)
}
