//! `burn-megatron plan`: what a pipeline schedule costs, before anything starts.

mod args;
mod report;
#[cfg(test)]
mod tests;

use std::fs;
use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};

use args::{DurationArgs, PipelineArgs, StageArgs};
use report::Plan;

use super::print;
use crate::schedule::draw::{self, Colors};

/// Arguments of `plan`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Draw the time line of every rank
    #[arg(long)]
    draw: bool,
    /// Also draw it into this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    #[command(flatten)]
    pipeline: PipelineArgs,
    #[command(flatten)]
    stages: StageArgs,
    #[command(flatten)]
    durations: DurationArgs,
}

/// Prints bubble and activations in flight, and draws.
pub fn run(args: Args) -> Result<ExitCode> {
    let plan = Plan::of(&args)?;
    let colors = if io::stdout().is_terminal() { Colors::Ansi } else { Colors::Off };
    print(&plan.report(args.draw.then_some(colors))?)?;
    if let Some(file) = &args.svg {
        let svg = draw::svg(&plan.timeline, &plan.title(), &plan.bubble());
        fs::write(file, svg).with_context(|| file.display().to_string())?;
        print(&format!("wrote {}\n", file.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}
