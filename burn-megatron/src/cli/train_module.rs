//! `train` of a model that is a plain Burn module.

use std::process::ExitCode;

use anyhow::{Result, bail};
use backend_dist::process::Cluster;

use super::device::DeviceKind;
use super::print;
use super::processes::{join_module, tell};
use crate::config::ModuleConfig;
use crate::console::format::duration;
use crate::train::{STOPPED, TrainError, check_module, check_module_data, new_head, train_module_among};

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
    if asked.print_config {
        print(&config.to_toml())?;
        return Ok(ExitCode::SUCCESS);
    }
    if asked.device == DeviceKind::Cpu {
        make_cpu_the_default();
    }
    check_module(config)?;
    let cluster = if asked.dry_run { Cluster::from([]) } else { join_module(config, asked.device)? };
    cluster.run(|| train(config, asked, &cluster))
}

/// Burn puts the states of optimizers that it reads, as those of a checkpoint, on its default device first: of a program that is
/// built for GPUs that is one, whether or not the machine has any.
fn make_cpu_the_default() {
    if std::env::var_os("BURN_DEVICE").is_none() {
        // SAFETY: the command begins, and no other thread of it reads the environment.
        unsafe { std::env::set_var("BURN_DEVICE", "flex") }
    }
}

fn train(config: &ModuleConfig, asked: &Asked, cluster: &Cluster) -> Result<ExitCode> {
    let (kind, training) = (config.model.model_type(), &config.training);
    let say = |line: std::fmt::Arguments| tell(cluster, line);
    say(format_args!(
        "{:<12} {kind}, a plain Burn module, {}",
        "model",
        format!("{:?}", training.dtype).to_lowercase()
    ));
    let processes = if cluster.count() > 1 { format!(" in {} processes", cluster.count()) } else { String::new() };
    if let Some(head) = new_head(config)? {
        say(format_args!("{:<12} {head}", "head"));
    }
    let (ranks, s) = (config.parallel.world_size(), if config.parallel.world_size() == 1 { "" } else { "s" });
    say(format_args!("{:<12} {} on {ranks} rank{s}{processes}", "layout", config.parallel));
    if let Some(rank) = config.lora.rank {
        let layers = config.lora.target_modules.join(", ");
        say(format_args!("{:<12} rank {rank} of {layers}; everything else is frozen", "adapters"));
    }
    let samples = match kind {
        "vit" => "images".to_string(),
        "llava" => format!("sequences of {} tokens with an image each", training.seq_length),
        _ => format!("sequences of {} tokens", training.seq_length),
    };
    say(format_args!("{:<12} {} steps of {} {samples}", "training", training.steps, training.global_batch));
    if let [first, ..] = &config.param_groups.frozen[..] {
        say(format_args!("{:<12} {} patterns, the first: {first}", "frozen", config.param_groups.frozen.len()));
    }
    if asked.dry_run {
        check_module_data(config)?.iter().for_each(|note| say(format_args!("{:<12} {note}", "images")));
        return Ok(ExitCode::SUCCESS);
    }
    let devices = asked.device.devices_in(&config.parallel, cluster)?;
    let report = match train_module_among(config, cluster, devices) {
        Err(TrainError::Failed) => return Ok(ExitCode::FAILURE),
        report => report?,
    };
    if report.from > 0 {
        say(format_args!("began after step {} of {}", report.from, training.steps));
    }
    if let Some(loss) = report.held_out {
        let accuracy = report.accuracy.map(|share| format!(", accuracy {:.2} %", 100.0 * share));
        say(format_args!("held-out loss {loss:.4}{}", accuracy.unwrap_or_default()));
    }
    let saves = config.checkpoint.directory.is_some();
    if report.stopped {
        tell(
            cluster,
            match saves {
                true => "stopped before its last step; the same command resumes from its last checkpoint",
                false => "stopped before its last step; nothing is saved, because checkpoint.directory = none",
            },
        );
        return Ok(if saves { ExitCode::from(STOPPED) } else { ExitCode::FAILURE });
    }
    say(format_args!("{} in all; logs and metrics in {}", duration(report.seconds), config.output.directory.display()));
    Ok(ExitCode::SUCCESS)
}
