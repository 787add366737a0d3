//! `burn-megatron plan`: memory, time and layouts of a run, or the cost of a pipeline schedule, before it starts.

mod args;
mod machine;
mod module;
mod report;
mod run;
#[cfg(test)]
mod tests;

use std::fs;
use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;

use args::{DurationArgs, PipelineArgs, StageArgs};
use machine::MachineArgs;
use module::ModuleArgs;
use report::Plan;

use super::layout::LayoutArgs;
use super::overrides::Overrides;
use super::{is_no_input, print, refused};
use crate::refusal::Access;
use crate::schedule::draw::{self, Colors};

/// Arguments of `plan`.
#[derive(Debug, clap::Args)]
#[command(after_help = "With a CONFIG every key of the file is also a flag, as for train: --SECTION.KEY VALUE.")]
pub struct Args {
    /// TOML file of a run: prints memory, communication volume and time of a step, and the fastest layouts. Without a
    /// file a pipeline schedule is simulated
    #[arg(value_name = "CONFIG")]
    config: Option<PathBuf>,
    /// Draw the timeline of every rank
    #[arg(long)]
    draw: bool,
    /// Also draw the timelines into this SVG file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    #[command(flatten)]
    module: ModuleArgs,
    #[command(flatten)]
    machine: MachineArgs,
    #[command(flatten)]
    pipeline: PipelineArgs,
    #[command(flatten)]
    stages: StageArgs,
    #[command(flatten)]
    durations: DurationArgs,
    #[command(flatten)]
    layout: LayoutArgs,
    #[command(flatten)]
    overrides: Overrides,
}

impl Args {
    /// The keys of CONFIG that flags give.
    fn overrides(&self) -> Vec<(String, String)> {
        let mut overrides = self.overrides.clone().with_layout(&self.layout);
        overrides.0.extend(self.stages.overrides(&self.pipeline));
        overrides.0
    }
}

/// Prints the needs of a run, or bubble and activations in flight of a schedule, and draws.
pub fn run(args: Args) -> Result<ExitCode> {
    if let Some(file) = &args.svg {
        let inputs: Vec<_> = args.config.iter().chain(&args.pipeline.schedule_file).collect();
        is_no_input("--svg", file, &inputs)?;
    }
    if let Some(folder) = &args.module.hf {
        print(&module::plan(&args, folder)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    // https://no-color.org
    let wanted = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let colors = if wanted && io::stdout().is_terminal() { Colors::Ansi } else { Colors::Off };
    let colors = args.draw.then_some(colors);
    let plan = match &args.config {
        Some(_) => {
            if let Some(text) = module::plan_run(&args)? {
                print(&text)?;
                return Ok(ExitCode::SUCCESS);
            }
            let (text, plan) = run::plan(&args)?;
            print(&text)?;
            if let Some(colors) = colors {
                print(&plan.drawing(colors))?;
            }
            plan
        }
        None => {
            let plan = Plan::of(&args)?;
            print(&plan.report(colors)?)?;
            plan
        }
    };
    if let Some(file) = &args.svg {
        let svg = draw::svg(&plan.timeline, &plan.title(), &plan.bubble());
        fs::write(file, svg).map_err(refused(Access::Write, file))?;
        print(&format!("wrote {}\n", file.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}
