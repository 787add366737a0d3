//! `burn-megatron merge`: a Hugging Face folder with an adapter's weights added.

use std::path::PathBuf;
use std::process::ExitCode;

use indicatif::HumanBytes;

use crate::element::Element;
use crate::hf::{Export, Format, HfFolder, Merged, export, parse_size, read_adapter};

/// Arguments of `merge`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder with config.json and the weights of the base model
    #[arg(long, value_name = "DIR")]
    hf: PathBuf,
    /// Folder with adapter_config.json and adapter_model.safetensors, as peft writes them
    #[arg(long, value_name = "DIR")]
    adapter: PathBuf,
    /// Folder to write; it must not exist, or be empty
    #[arg(long, value_name = "DIR")]
    output: PathBuf,
    /// Element type of the weights: f64, f32, bf16 or f16 [default: as they are stored]
    #[arg(long, value_name = "TYPE")]
    dtype: Option<Element>,
    /// Largest file of weights, unless a single tensor is larger
    #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = parse_size)]
    max_shard_size: u64,
}

/// Writes the folder.
///
/// # Errors
/// If base and adapter do not belong together, or a file cannot be read or written.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let base = HfFolder::open(&args.hf)?;
    let adapter = read_adapter(&args.adapter, base.config())?;
    let tokenizer = base.tokenizer_path();
    let what = Export {
        config: base.config(),
        companions: base.companions(),
        tokenizer: tokenizer.as_deref(),
        element: args.dtype,
        shard_bytes: args.max_shard_size,
        format: Format::Safetensors,
    };
    let (files, bytes) = export(&args.output, &what, &Merged { base: &base, adapter: &adapter, element: args.dtype })?;
    super::print(&format!(
        "{}: {} of the model's layers with their adapters, in {files} file{} of weights, {}\n",
        args.output.display(),
        adapter.plan.len(),
        if files == 1 { "" } else { "s" },
        HumanBytes(bytes)
    ))?;
    Ok(ExitCode::SUCCESS)
}
