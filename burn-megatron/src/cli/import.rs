//! `burn-megatron import`: from a Hugging Face folder to a checkpoint.

use std::path::PathBuf;
use std::process::ExitCode;

use indicatif::HumanBytes;

use crate::hf::{HfFolder, OptimizerStates, import};

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
    /// Take the moments of AdamW too, from a DCP checkpoint of PyTorch or Megatron-Core: a run continues from the checkpoint
    #[arg(long)]
    optimizer: bool,
    /// Samples that the run had consumed, where its checkpoint does not say: PyTorch's
    #[arg(long, value_name = "N", requires = "optimizer")]
    consumed_samples: Option<u64>,
    /// Folder to write the checkpoint into, as step 0 or that of the optimizer; it must hold none yet
    #[arg(long, alias = "checkpoint", value_name = "CKPT")]
    output: PathBuf,
}

/// Checks the folder and writes the checkpoint. Fails if the folder is not a model of ours, or the checkpoint cannot be
/// written.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let weights = args.weights.as_ref().unwrap_or(&args.hf);
    let folder = HfFolder::with_weights(&args.hf, weights)?;
    super::say_left_out(&folder, None);
    let states = if args.optimizer { OptimizerStates::read(&folder, weights, args.consumed_samples)? } else { None };
    let tokenizer = super::tokenizer_to_copy(&args.hf);
    let with = if tokenizer.is_some() { "with" } else { "without" };
    let report = import(&folder, states.as_ref(), tokenizer, &args.output)?;
    let what = if states.is_some() { "weights and moments" } else { "weights" };
    super::print(&format!(
        "{}: {} of {what} in {:.1} s, {with} a tokenizer\n",
        report.path.display(),
        HumanBytes(report.bytes),
        report.seconds
    ))?;
    match states {
        Some(states) => {
            super::print(&told(&states))?;
        }
        None if args.optimizer => super::print("no moments of an optimizer there: weights only\n")?,
        None => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// What was taken of an optimizer, and what the file of a run that continues has to say.
fn told(states: &OptimizerStates) -> String {
    let mut lines = vec![format!("moments of {} updates, {} samples consumed", states.updates(), states.consumed())];
    lines.extend(states.notes().iter().map(|note| format!("note: {note}")));
    let config = toml::to_string(states.config()).unwrap_or_default();
    lines.push(format!("the run that continues says in its file:\n{config}"));
    lines.join("\n")
}
