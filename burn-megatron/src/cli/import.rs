//! `burn-megatron import`: from a Hugging Face folder to a checkpoint.

use std::path::PathBuf;
use std::process::ExitCode;

use indicatif::HumanBytes;

use crate::hf::{HfFolder, import};

/// Arguments of `import`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder with config.json, the weights and perhaps a tokenizer; weights are safetensors files or a PyTorch DCP
    /// checkpoint
    #[arg(long, value_name = "DIR")]
    hf: PathBuf,
    /// Folder with the weights, if they are not in that of config.json
    #[arg(long, value_name = "DIR")]
    weights: Option<PathBuf>,
    /// Folder to write the checkpoint into, as step 0; it must hold none yet
    #[arg(long, alias = "checkpoint", value_name = "CKPT")]
    output: PathBuf,
}

/// Checks the folder and writes the checkpoint.
///
/// # Errors
/// If the folder is not a model of ours, or the checkpoint cannot be written.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let folder = HfFolder::with_weights(&args.hf, args.weights.as_ref().unwrap_or(&args.hf))?;
    let tokenizer = super::tokenizer_to_copy(&args.hf);
    let with = if tokenizer.is_some() { "with" } else { "without" };
    let report = import(&folder, tokenizer, &args.output)?;
    super::print(&format!(
        "{}: {} of weights in {:.1} s, {with} a tokenizer\n",
        report.path.display(),
        HumanBytes(report.bytes),
        report.seconds
    ))?;
    Ok(ExitCode::SUCCESS)
}
