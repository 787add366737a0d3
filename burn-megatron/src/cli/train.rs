//! `burn-megatron train`: a training run as one file describes it.

use std::path::PathBuf;
use std::process::ExitCode;

use backend_dist::process::Processes;

use super::device::Place;
use super::hints;
use super::layout::LayoutArgs;
use super::overrides::Overrides;
use super::preprocess::Display;
use super::print;
use super::processes::join;
use crate::config::RunConfig;
use crate::console::format::duration;
use crate::console::say;
use crate::train::{Plan, TrainError, train_among};

/// Arguments of `train`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Every key of the file is also a flag: --SECTION.KEY VALUE, for example --training.steps 100. \
                        --print-config lists them all with their meaning.")]
pub struct Args {
    /// The run's TOML file; without one all keys have their defaults
    #[arg(value_name = "CONFIG")]
    config: Option<PathBuf>,
    /// Where ranks run
    #[arg(long, value_enum, default_value = "cpu")]
    device: Place,
    /// Also write what every rank did when in the third to the fifth step; https://ui.perfetto.dev opens the file
    #[arg(long, value_name = "FILE")]
    trace: Option<String>,
    /// Print the resolved configuration, which is such a file itself, and stop
    #[arg(long)]
    print_config: bool,
    /// Check everything that can be checked beforehand, say what would run, and stop
    #[arg(long)]
    dry_run: bool,
    /// A key that may differ from the checkpoint that the run goes on from; may be given several times
    #[arg(long, value_name = "SECTION.KEY")]
    allow_change: Vec<String>,
    #[command(flatten)]
    layout: LayoutArgs,
    #[command(flatten)]
    overrides: Overrides,
}

/// Runs `train`.
///
/// # Errors
/// If the configuration is wrong or the run cannot start; a run that fails later says so itself.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let mut overrides = args.overrides.with_layout(&args.layout).0;
    overrides.extend(args.trace.map(|file| ("log.trace".to_string(), file)));
    let config = RunConfig::load(args.config.as_deref(), &overrides)?;
    if args.print_config {
        print(&config.to_toml())?;
        return Ok(ExitCode::SUCCESS);
    }
    let processes = if args.dry_run { None } else { join(&config, args.device)? };
    let speaks = processes.as_ref().is_none_or(Processes::is_first);
    let prepare = || -> anyhow::Result<_> {
        let plan = Plan::new(&config, &args.allow_change)?;
        if speaks {
            say(&plan);
            let hint = if args.device == Place::Cuda { hints::of(&config) } else { None };
            if let Some(hint) = hint {
                say(format_args!("{:<12} {hint}", "hint"));
            }
        }
        let devices = match &processes {
            _ if args.dry_run => {
                plan.check_tokenizer()?;
                Vec::new()
            }
            Some(processes) => args.device.devices_among(processes)?,
            None => args.device.devices(&config.parallel)?,
        };
        Ok((plan, devices))
    };
    let (plan, devices) = match &processes {
        Some(processes) => processes.attempt(prepare)?,
        None => prepare()?,
    };
    if args.dry_run {
        return Ok(ExitCode::SUCCESS);
    }
    let mut display = Display::new();
    let result = train_among(&plan, processes.as_ref(), devices, &mut |progress| display.show(progress));
    display.clear();
    let outcome = match result {
        Err(TrainError::Failed) => return Ok(ExitCode::FAILURE),
        result => result?,
    };
    if !speaks {
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(last) = outcome.last {
        say(format_args!(
            "held-out loss {:.4}, perplexity {:.2} over {} tokens",
            last.loss,
            last.loss.exp(),
            last.tokens
        ));
    }
    if outcome.stopped {
        say("stopped before its last step; the same command goes on from there");
    }
    if let Some(file) = &config.log.trace {
        say(format_args!("timeline of a few steps in {}; open it in https://ui.perfetto.dev", file.display()));
        // A run that ended early may have none.
        print(&std::fs::read_to_string(crate::trace::summary_file(file)).unwrap_or_default())?;
    }
    say(format_args!(
        "{} in all; logs and metrics in {}",
        duration(outcome.seconds),
        config.output.directory.display()
    ));
    Ok(ExitCode::SUCCESS)
}
