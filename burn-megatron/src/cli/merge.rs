//! `burn-megatron merge`: a Hugging Face folder with the weights of adapters added.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::bail;
use indicatif::HumanBytes;

use crate::element::Element;
use crate::hf::{Export, Format, HfFolderError, Merged, ModuleFolder, export, parse_size, read_adapter};

/// Arguments of `merge`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder with config.json and the weights of the base model
    #[arg(long, value_name = "DIR")]
    hf: PathBuf,
    /// Folder with adapter_config.json and adapter_model.safetensors, as peft writes them; may be given several times
    #[arg(long = "adapter", value_name = "DIR", required = true)]
    adapters: Vec<PathBuf>,
    /// Factor of what an adapter adds to the weights, for each --adapter in order [default: 1]
    #[arg(long = "weight", value_name = "FACTOR", allow_negative_numbers = true)]
    weights: Vec<f64>,
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

/// Writes the folder. Fails if base and adapter do not belong together, or a file cannot be read or written.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    if ModuleFolder::is_one(&args.hf)? {
        return module(&args);
    }
    let base = super::open_folder(&args.hf, None)?;
    let (adapters, weights) = (&args.adapters, &args.weights);
    if !weights.is_empty() && weights.len() != adapters.len() {
        let (given, needed) = (weights.len(), adapters.len());
        bail!("{given} factors (--weight) for {needed} adapters; nearest legal: {needed}, or none");
    }
    if let Some(weight) = weights.iter().find(|weight| !weight.is_finite()) {
        bail!("--weight {weight} is no finite number; nearest legal: 1");
    }
    let factors = weights.iter().copied().chain(std::iter::repeat(1.0));
    let adapters = adapters
        .iter()
        .zip(factors)
        .map(|(path, factor)| Ok((read_adapter(path, base.config())?, factor)))
        .collect::<Result<Vec<_>, HfFolderError>>()?;
    let tokenizer = super::tokenizer_to_copy(&args.hf);
    let what = Export {
        config: base.config(),
        companions: base.companions(),
        tokenizer: tokenizer.as_deref(),
        element: args.dtype,
        shard_bytes: args.max_shard_size,
        format: Format::Safetensors,
    };
    let (files, bytes) =
        export(&args.output, &what, &Merged { base: &base, adapters: &adapters, element: args.dtype })?;
    let layers: BTreeSet<&str> = adapters.iter().flat_map(|(adapter, _)| adapter.plan.modules().into_keys()).collect();
    report(&args, layers.len(), files, bytes)
}

/// Writes the folder of a plain Burn module.
fn module(args: &Args) -> anyhow::Result<ExitCode> {
    let [adapter] = &args.adapters[..] else {
        bail!(
            "{} adapters (--adapter) of a plain Burn module; nearest legal: 1, whose --output is the --hf of the next",
            args.adapters.len()
        );
    };
    if let Some(weight) = args.weights.first() {
        bail!("--weight {weight} is not for adapters of a plain Burn module; nearest legal: none, which is 1");
    }
    let folder = ModuleFolder::open(&args.hf)?.with_adapter(adapter);
    let (layers, files, bytes) = folder.write_merged(&args.output, args.dtype, args.max_shard_size)?;
    report(args, layers, files, bytes)
}

fn report(args: &Args, layers: usize, files: usize, bytes: u64) -> anyhow::Result<ExitCode> {
    super::print(&format!(
        "{}: {layers} of the model's layers with their adapters, in {files} file{} of weights, {}\n",
        args.output.display(),
        if files == 1 { "" } else { "s" },
        HumanBytes(bytes)
    ))?;
    Ok(ExitCode::SUCCESS)
}
