//! `burn-megatron export`: from a checkpoint to a Hugging Face folder, or to a checkpoint of PyTorch or Megatron-Core.

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use indicatif::HumanBytes;
use models::lora::LoraError;
use models::{FamilyConfig, LoraPlan, ModelConfig};

use super::quantise::QuantiseArgs;
use super::refused;
use crate::checkpoint::{Checkpoint, Kind};
use crate::config::LoraSection;
use crate::console::warn;
use crate::data::preprocess::end_of_document;
use crate::data::read_tokenizer;
use crate::element::Element;
use crate::hf::{
    CheckpointWeights, Companions, Export, Format, adapter_of, companions_of, export, export_states, model_of,
    parse_size, refuse_full, write_adapter,
};
use crate::refusal::Access;
use crate::train::ModuleRun;

/// Arguments of `export`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder to write; it must not exist, or be empty
    #[arg(long, value_name = "DIR")]
    hf: Option<PathBuf>,
    /// Folder to write the weights to as a PyTorch DCP checkpoint with Hugging Face's names
    #[arg(long, value_name = "DIR", conflicts_with_all = ["hf", "adapter"])]
    dcp: Option<PathBuf>,
    /// Folder to write the weights to as Megatron-Core's torch_dist
    #[arg(long, value_name = "DIR", conflicts_with_all = ["hf", "adapter", "dcp"])]
    torch_dist: Option<PathBuf>,
    /// Folder to write the adapters to that the run has trained ([lora]), as peft does
    #[arg(long, value_name = "DIR", conflicts_with = "hf")]
    adapter: Option<PathBuf>,
    /// Checkpoint, or folder of checkpoints: then the latest
    #[arg(long, value_name = "CKPT")]
    checkpoint: Option<PathBuf>,
    /// Hugging Face folder to quantise, in place of a checkpoint
    #[arg(long, value_name = "DIR", conflicts_with_all = ["checkpoint", "ema", "like"], requires = "quantize")]
    from_hf: Option<PathBuf>,
    /// Element type of the weights: f64, f32, bf16 or f16 [default: as they are stored]
    #[arg(long, value_name = "TYPE")]
    dtype: Option<Element>,
    /// Write the exponential moving average of the weights (training.ema-decay), by default in the type of the weights
    #[arg(long)]
    ema: bool,
    /// Largest file of weights, unless a single tensor is larger
    #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = parse_size)]
    max_shard_size: u64,
    /// Hugging Face folder whose tokenizer and small files are taken, where the checkpoint has none of its own
    #[arg(long, value_name = "DIR")]
    like: Option<PathBuf>,
    /// Write the moments of AdamW too, and what a run of PyTorch or Megatron-Core needs to continue
    #[arg(long, conflicts_with_all = ["hf", "adapter", "ema"])]
    optimizer: bool,
    /// With --torch-dist --optimizer: expert-parallel size of the run of Megatron-Core that is to continue, which above 1 has
    /// an optimizer of their own for experts [default: that of the checkpoint's run]
    #[arg(
        long,
        alias = "expert-model-parallel-size",
        value_name = "N",
        requires = "torch_dist",
        requires = "optimizer"
    )]
    expert_parallel: Option<NonZero<usize>>,
    #[command(flatten)]
    quantise: QuantiseArgs,
}

/// Checks the checkpoint's hashes and writes the folder. Fails if the checkpoint is damaged or not of a model that
/// Hugging Face has, or the folder cannot be written.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    if [&args.hf, &args.dcp, &args.torch_dist, &args.adapter].iter().all(|folder| folder.is_none()) {
        bail!("--hf, --dcp, --torch-dist or --adapter DIR says where to write");
    }
    for folder in [&args.hf, &args.dcp, &args.torch_dist, &args.adapter].into_iter().flatten() {
        refuse_full(folder)?;
    }
    if let (Some(from), Some(to)) = (&args.from_hf, &args.hf) {
        super::print(&args.quantise.export(from, to, args.dtype, args.max_shard_size)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let from = args.checkpoint.as_deref().context("--checkpoint CKPT or --from-hf DIR says what to write")?;
    if let Some(run) = ModuleRun::find(from)? {
        return module(&run, &args);
    }
    let checkpoint = Checkpoint::open(from)?;
    if let Some(warning) = checkpoint.warning() {
        warn(format_args!("warning: {warning}"));
    }
    let config = model_of(&checkpoint)?;
    let format = match (&args.dcp, &args.torch_dist) {
        (Some(_), _) => Format::Dcp,
        (_, Some(_)) => {
            let (iteration, own) = (checkpoint.state().step, checkpoint.state().layout.ep);
            Format::TorchDist { iteration, expert_parallel: args.expert_parallel.map_or(own, NonZero::get) }
        }
        _ => Format::Safetensors,
    };
    let folder = args.hf.or(args.dcp).or(args.torch_dist);
    let hf = match (folder, args.adapter, adapters(&checkpoint, &config)?) {
        (Some(_), _, Some(_)) => bail!(
            "{} has adapters only: write them with --adapter DIR, then `burn-megatron merge` adds them to their base",
            checkpoint.path().display()
        ),
        (None, Some(folder), Some(plan)) => {
            let kind = if args.ema { average(&checkpoint)? } else { checkpoint.weights() };
            return write(&checkpoint, kind, &folder, plan);
        }
        (None, Some(_), None) => {
            bail!("{} has no adapters: its run had no [lora]; give --hf", checkpoint.path().display())
        }
        (hf, ..) => hf.context("--hf is needed")?,
    };
    let (mut companions, mut tokenizer) = (companions_of(&checkpoint)?, checkpoint.tokenizer());
    if let Some(like) = &args.like {
        let found = Companions::read(like).with_context(|| format!("--like {}", like.display()))?;
        companions = if companions.is_empty() { found } else { companions };
        tokenizer = tokenizer.or_else(|| super::tokenizer_to_copy(like));
    }
    if tokenizer.is_none() {
        let what = "the checkpoint is without a tokenizer, as its run had no data.tokenizer";
        warn(format_args!("note: {what}; copy its tokenizer.json into {}, or take --like DIR", hf.display()));
    }
    if companions.is_empty() {
        companions = of_new_model(&checkpoint, tokenizer.as_deref())?;
    }
    checkpoint.verify(0, 1)?;
    if args.ema {
        average(&checkpoint)?;
    }
    let what = Export {
        config: &config,
        companions: &companions,
        tokenizer: tokenizer.as_deref(),
        element: args.dtype,
        shard_bytes: args.max_shard_size,
        format,
    };
    let weights = match args.dtype {
        Some(_) if args.ema => CheckpointWeights::average(&checkpoint),
        None if args.ema => CheckpointWeights::rounded_average(&checkpoint),
        Some(_) => CheckpointWeights::most_precise(&checkpoint),
        // An optimizer of PyTorch has no other weights than the model's.
        None if args.optimizer && format == Format::Dcp => CheckpointWeights::most_precise(&checkpoint),
        None => CheckpointWeights::of(&checkpoint),
    };
    if args.quantise.is_asked()? {
        // Calibration and perplexity read a folder with its tokenizer.
        let parent = hf.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        std::fs::create_dir_all(parent).map_err(refused(Access::Write, parent))?;
        let plain = tempfile::tempdir_in(parent).map_err(refused(Access::Write, parent))?;
        export(plain.path(), &what, &weights)?;
        super::print(&args.quantise.export(plain.path(), &hf, None, args.max_shard_size)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let (files, bytes) = match args.optimizer {
        true => export_states(&hf, &what, &weights, &checkpoint)?,
        false => export(&hf, &what, &weights)?,
    };
    let experts = match format {
        Format::TorchDist { expert_parallel, .. } if args.optimizer && config.dims().experts.is_some() => {
            format!("; for expert-model-parallel-size {}", if expert_parallel > 1 { "above 1" } else { "1" })
        }
        _ => String::new(),
    };
    super::print(&format!(
        "{}: step {} in {files} file{} of weights{}, {}{experts}\n",
        hf.display(),
        checkpoint.state().step,
        if files == 1 { "" } else { "s" },
        if args.optimizer { " and moments" } else { "" },
        HumanBytes(bytes)
    ))?;
    Ok(ExitCode::SUCCESS)
}

/// The model of a run of a plain Burn module.
fn module(run: &ModuleRun, args: &Args) -> anyhow::Result<ExitCode> {
    let kind = run.config.model.model_type();
    let others = [
        ("--ema", args.ema),
        ("--like", args.like.is_some()),
        ("--optimizer", args.optimizer),
        ("--quantize", args.quantise.is_asked()?),
    ];
    if let Some((flag, _)) = others.into_iter().find(|(_, given)| *given) {
        bail!("{flag} has no meaning with {kind}, a plain Burn module; nearest legal: without it");
    }
    if let Some(folder) = &args.adapter {
        let (step, layers) = run.export_adapter(folder)?;
        super::print(&format!("{}: step {step}, adapters of {layers} layers\n", folder.display()))?;
        return Ok(ExitCode::SUCCESS);
    }
    let hf = args.hf.as_deref().with_context(|| {
        format!("{kind} is written as a Hugging Face folder (--hf DIR), its adapters as peft has them (--adapter DIR)")
    })?;
    let (step, files) = run.export(hf, args.dtype, args.max_shard_size)?;
    let s = if files == 1 { "" } else { "s" };
    super::print(&format!("{}: step {step} in {files} file{s} of weights\n", hf.display()))?;
    Ok(ExitCode::SUCCESS)
}

/// The small files of a model that was trained from nothing, as far as its checkpoint says how. What ends a document ends a
/// text.
fn of_new_model(checkpoint: &Checkpoint, tokenizer: Option<&Path>) -> anyhow::Result<Companions> {
    let Some(data) = checkpoint.state().config.get("data") else { return Ok(Companions::default()) };
    let tokenizer = tokenizer.map(read_tokenizer).transpose()?;
    let end = data["eod-id"].as_i64().or_else(|| end_of_document(tokenizer.as_ref()?, None));
    Ok(Companions::of_new_model(end, tokenizer.as_ref()))
}

/// The kind of the average of a checkpoint's weights. Fails if it has none.
fn average(checkpoint: &Checkpoint) -> anyhow::Result<Kind> {
    if !checkpoint.tensors().iter().any(|tensor| tensor.kind == Kind::Average) {
        bail!("{} has no average of its weights: its run had no training.ema-decay", checkpoint.path().display());
    }
    Ok(Kind::Average)
}

/// The adapters that a checkpoint has in place of a model's weights. Fails if its configuration says what the model
/// cannot have.
pub(super) fn adapters(checkpoint: &Checkpoint, model: &FamilyConfig) -> Result<Option<LoraPlan>, LoraError> {
    let lora: Option<LoraSection> = serde_json::from_value(checkpoint.state().config["lora"].clone()).ok();
    lora.map_or(Ok(None), |lora| lora.plan(model))
}

/// Writes the adapters of a checkpoint.
fn write(checkpoint: &Checkpoint, kind: Kind, folder: &Path, plan: LoraPlan) -> anyhow::Result<ExitCode> {
    checkpoint.verify(0, 1)?;
    let adapter = adapter_of(checkpoint, kind, plan)?;
    let base = checkpoint.state().config["model"]["hf"].as_str();
    write_adapter(folder, &adapter, base)?;
    let (step, layers) = (checkpoint.state().step, adapter.plan.len());
    super::print(&format!("{}: step {step}, adapters of {layers} layers\n", folder.display()))?;
    Ok(ExitCode::SUCCESS)
}
