//! `burn-megatron prune`: a smaller model from some of a model's weights.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use backend_dist::launch::BoxError;
use models::{FamilyConfig, ModelConfig};

use super::calibration::{CalibrationArgs, compared};
use crate::element::Element;
use crate::hf::{Export, Format, HfFolder, export, parse_size, refuse_full};
use crate::prune::{Kept, Loss, Pruned, Sizes, importance};

/// Arguments of `prune`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder with config.json, the weights and the tokenizer: a model of Llama's family
    #[arg(long, value_name = "DIR")]
    hf: PathBuf,
    /// Folder to write; it must not exist, or be empty
    #[arg(long, value_name = "DIR")]
    output: PathBuf,
    /// Blocks to keep: those without which the calibration texts' loss is largest
    #[arg(long, value_name = "N")]
    layers: Option<usize>,
    /// Neurons of every MLP to keep
    #[arg(long, value_name = "N")]
    intermediate: Option<usize>,
    /// Features of the residual stream to keep, the same in all blocks
    #[arg(long, value_name = "N")]
    hidden: Option<usize>,
    /// Query heads of every block to keep; those that share a key-value head stay together
    #[arg(long, value_name = "N")]
    heads: Option<usize>,
    #[command(flatten)]
    texts: CalibrationArgs,
    /// Element type of the weights: f64, f32, bf16 or f16 [default: as they are stored]
    #[arg(long, value_name = "TYPE")]
    dtype: Option<Element>,
    /// Largest file of weights, unless a single tensor is larger
    #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = parse_size)]
    max_shard_size: u64,
}

/// Writes the smaller model. Fails if the model is of another family, a size is not one of its parts, or a file cannot
/// be used.
pub fn run(args: Args) -> Result<ExitCode> {
    let sizes = Sizes { layers: args.layers, intermediate: args.intermediate, hidden: args.hidden, heads: args.heads };
    if sizes == Sizes::default() {
        bail!("nothing is to be pruned: give --layers, --intermediate, --hidden or --heads");
    }
    if args.texts.calibration.is_empty() {
        bail!("--calibration is needed: texts that show what is important");
    }
    refuse_full(&args.output)?;
    let folder = super::open_folder(&args.hf, None)?;
    let model = folder.config();
    sizes.check(model).with_context(|| format!("--hf {}", args.hf.display()))?;
    let texts = args.texts.texts(&args.hf, &folder)?;
    let mut loss = |pruned: &Pruned| -> Result<f64, BoxError> { Ok(texts.loss((pruned.config(), pruned))?) };
    let loss: Option<&mut Loss> =
        if sizes.layers.is_some_and(|layers| layers < model.dims().layers) { Some(&mut loss) } else { None };
    let importance =
        importance(&texts.calibration(&folder), (model, &folder), loss).map_err(|error| anyhow::anyhow!(error))?;
    let before = texts.perplexities(&folder)?;
    let pruned = Pruned::new(&folder, model, Kept::most_important(model, &sizes, &importance)?)?;
    let tokenizer = super::tokenizer_to_copy(&args.hf);
    let what = Export {
        config: pruned.config(),
        companions: folder.companions(),
        tokenizer: tokenizer.as_deref(),
        element: args.dtype,
        shard_bytes: args.max_shard_size,
        format: Format::Safetensors,
    };
    export(&args.output, &what, &pruned)?;
    let after = texts.perplexities(&HfFolder::open(&args.output)?)?;
    super::print(&said(&args, model, &pruned, &importance.layers))?;
    super::print(&compared(&before, &after))?;
    Ok(ExitCode::SUCCESS)
}

fn said(args: &Args, model: &FamilyConfig, pruned: &Pruned, losses: &[f64]) -> String {
    let (before, after) = (model.parameter_count(), pruned.config().parameter_count());
    let share = 100.0 * after as f64 / before as f64;
    let mut said = format!("{}: {after} of {before} parameters, {share:.1} %\n", args.output.display());
    if !losses.is_empty() {
        let kept: Vec<String> = pruned.layers().iter().map(ToString::to_string).collect();
        said += &format!("kept layers: {}\n", kept.join(", "));
    }
    said
}
