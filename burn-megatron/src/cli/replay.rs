//! `burn-megatron replay`: repeat a recorded Megatron-Core run and compare every step.

use std::path::PathBuf;
use std::process::ExitCode;

use backend_dist::mesh::ParallelLayout;

use super::layout::LayoutArgs;
use super::processes::alone;
use crate::config::Precision;
use crate::replay::{Oracle, replay};

/// Arguments of `replay`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder with metrics.json, tokens.safetensors, init.safetensors and final.safetensors
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// Precision. The recorded runs are fp32; f64 leaves only their own rounding, with f32 ours comes on top
    #[arg(long, value_enum, default_value = "f64")]
    dtype: Precision,
    #[command(flatten)]
    layout: LayoutArgs,
}

/// Prints the table; the exit code is 1 where a step or a weight differs by more than rounding.
///
/// # Errors
/// If the folder or the layout cannot be run.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    alone("replay")?;
    let layout = args.layout.over(ParallelLayout::default())?;
    let oracle = Oracle::load(&args.dir)?;
    let (model, training) = (&oracle.model, &oracle.training);
    println!(
        "replaying {} in {layout}, {:?}: {} layers, width {}, {} steps of {} x {} tokens",
        args.dir.display(),
        args.dtype,
        model.num_layers,
        model.hidden_size,
        oracle.steps.len(),
        training.global_batch_size,
        model.seq_length
    );
    let replay = replay(&oracle, &layout, args.dtype.into())?;
    println!("{replay}");
    Ok(if replay.passes() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
