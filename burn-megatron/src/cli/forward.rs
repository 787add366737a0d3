//! `burn-megatron forward`: logits, loss and gradients of a Hugging Face folder.

use std::path::PathBuf;
use std::process::ExitCode;

use backend_dist::mesh::ParallelLayout;
use burn::tensor::FloatDType;
use clap::ValueEnum;

use super::device::DeviceKind;
use super::layout::LayoutArgs;
use super::processes::alone;
use crate::element::Element;
use crate::forward::{Settings, forward, read_input, write_output};
use crate::hf::HfFolder;

/// What is computed in.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum Precision {
    F64,
    F32,
    Bf16,
}

impl From<Precision> for FloatDType {
    fn from(precision: Precision) -> Self {
        match precision {
            Precision::F64 => FloatDType::F64,
            Precision::F32 => FloatDType::F32,
            Precision::Bf16 => FloatDType::BF16,
        }
    }
}

/// Arguments of `forward`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder with config.json and the weights
    #[arg(long, value_name = "DIR")]
    hf: PathBuf,
    /// Safetensors file with `input_ids` [sequences, tokens] and perhaps `labels` of the same shape; -100 is ignored
    #[arg(long, value_name = "FILE")]
    input: PathBuf,
    /// Safetensors file to write: `logits`, with labels `loss`, with --grads `grad.NAME` of every weight
    #[arg(long, value_name = "FILE")]
    output: PathBuf,
    /// Also compute the gradient of the loss of every weight
    #[arg(long)]
    grads: bool,
    /// Type of weights and activations
    #[arg(long, value_enum, default_value = "f32")]
    dtype: Precision,
    /// Compute everything in --dtype. Without it, RMSNorms and the loss are rounded to fp32 also in f64, as
    /// transformers does it
    #[arg(long)]
    exact: bool,
    /// Where the ranks run
    #[arg(long, value_enum, default_value = "cpu")]
    device: DeviceKind,
    #[command(flatten)]
    layout: LayoutArgs,
}

/// Writes the output file and says what is in it.
///
/// # Errors
/// If a file, the model or the layout cannot be used.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    alone("forward")?;
    let layout = args.layout.over(ParallelLayout::default())?;
    let input = read_input(&args.input)?;
    let folder = HfFolder::open(&args.hf)?;
    let settings = Settings {
        devices: args.device.devices(&layout)?,
        layout,
        dtype: args.dtype.into(),
        exact: args.exact,
        gradients: args.grads,
    };
    let output = forward(folder.config(), &folder, &input, &settings)?;
    let element = if matches!(args.dtype, Precision::F64) { Element::F64 } else { Element::F32 };
    write_output(&args.output, &input, &output, element)?;
    let loss = output.loss.map_or(String::new(), |loss| format!(", loss {loss:.9}"));
    let gradients = match output.gradients.len() {
        0 => String::new(),
        count => format!(", {count} gradients"),
    };
    super::print(&format!(
        "{} x {} tokens in {}, {:?}: logits{loss}{gradients} in {}\n",
        input.sequences,
        input.seq,
        settings.layout,
        args.dtype,
        args.output.display()
    ))?;
    Ok(ExitCode::SUCCESS)
}
