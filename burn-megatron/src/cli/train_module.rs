//! `train` of a model that is a plain Burn module.

use std::process::ExitCode;

use anyhow::{Result, bail};
use backend_dist::process::ProcessWorld;

use super::device::DeviceKind;
use super::print;
use crate::config::ModuleConfig;
use crate::console::format::duration;
use crate::console::say;
use crate::train::{STOPPED, TrainError, check_module, train_module};

/// What the command line asks for besides the configuration.
pub(super) struct Asked {
    pub device: DeviceKind,
    pub print_config: bool,
    pub dry_run: bool,
    /// The first flag that has no meaning with such a model.
    pub refused: Option<&'static str>,
}

/// Trains, or says what it would do. Fails if the run cannot start; a run that fails later says so itself.
pub(super) fn run(config: &ModuleConfig, asked: &Asked) -> Result<ExitCode> {
    let kind = config.model.model_type();
    if let Some(flag) = asked.refused {
        bail!("{flag} has no meaning with {kind}, a plain Burn module; nearest legal: without it");
    }
    if let Some(world) = ProcessWorld::from_env()?.filter(|world| world.processes > 1) {
        bail!(
            "{} processes: {kind} is trained in one, with a rank on each of its devices; nearest legal: 1",
            world.processes
        );
    }
    if asked.print_config {
        print(&config.to_toml())?;
        return Ok(ExitCode::SUCCESS);
    }
    check_module(config)?;
    if asked.device == DeviceKind::Cuda && config.parallel.pp > 1 {
        bail!(
            "parallel.pipeline-parallel = {}: {kind} has pipelines on CPU ranks only; nearest legal: 1",
            config.parallel.pp
        );
    }
    let training = &config.training;
    say(format_args!(
        "{:<12} {kind}, a plain Burn module, {}",
        "model",
        format!("{:?}", training.dtype).to_lowercase()
    ));
    say(format_args!("{:<12} {} on {} ranks", "layout", config.parallel, config.parallel.world_size()));
    say(format_args!(
        "{:<12} {} steps of {} sequences of {} tokens",
        "training", training.steps, training.global_batch, training.seq_length
    ));
    if asked.dry_run {
        return Ok(ExitCode::SUCCESS);
    }
    let devices = asked.device.devices(&config.parallel)?;
    let report = match train_module(config, devices) {
        Err(TrainError::Failed) => return Ok(ExitCode::FAILURE),
        report => report?,
    };
    if report.from > 0 {
        say(format_args!("began after step {} of {}", report.from, training.steps));
    }
    if let Some(loss) = report.held_out {
        say(format_args!("held-out loss {loss:.4}"));
    }
    let saves = config.checkpoint.directory.is_some();
    if report.stopped {
        say(match saves {
            true => "stopped before its last step; the same command resumes from its last checkpoint",
            false => "stopped before its last step; nothing is saved, because checkpoint.directory = none",
        });
        return Ok(if saves { ExitCode::from(STOPPED) } else { ExitCode::FAILURE });
    }
    say(format_args!("{} in all; logs and metrics in {}", duration(report.seconds), config.output.directory.display()));
    Ok(ExitCode::SUCCESS)
}
