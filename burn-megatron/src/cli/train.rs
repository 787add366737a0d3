//! `burn-megatron train`: a training run as one file describes it.

use std::path::PathBuf;
use std::process::ExitCode;

use backend_dist::mesh::ParallelLayout;
use backend_dist::process::Processes;

use super::device::{DeviceChoice, DeviceKind};
use super::hints;
use super::host;
use super::layout::LayoutArgs;
use super::overrides::Overrides;
use super::preprocess::Display;
use super::print;
use super::processes::{alone, join};
use super::train_module::{self, Asked};
use crate::config::{ModuleConfig, RunConfig};
use crate::console::format::duration;
use crate::console::say;
use crate::learner::Faults;
use crate::metrics::TokenLoss;
use crate::train::{Plan, STOPPED, TrainError, train_among, write_top_k};

/// Arguments of `train`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Every key of the file is also a flag: --SECTION.KEY VALUE, for example --training.steps 100. \
                        --print-config lists them all with their meaning.\n\nExit code: 0 all steps are done, or the run has ended at \
                        training.exit-duration-in-mins or training.exit-interval, 75 stopped \
                        before (Ctrl-C, SIGTERM, SIGHUP: it saves, and the same command resumes it), 1 failed, or stopped \
                        before with checkpoint.directory = none, 2 wrong flags.")]
pub struct Args {
    /// TOML file of the run; without one all keys have their defaults
    #[arg(value_name = "CONFIG")]
    config: Option<PathBuf>,
    /// Device of the ranks
    #[arg(long, value_enum, default_value = "auto")]
    device: DeviceChoice,
    /// Also write a timeline of the third to the fifth step on every rank, for https://ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    trace: Option<String>,
    /// Print the resolved configuration, which is such a file itself, and stop
    #[arg(long)]
    print_config: bool,
    /// Check the run, print what it would do, and stop before it starts
    #[arg(long)]
    dry_run: bool,
    /// Allow this key to differ from the checkpoint that the run resumes from; may be given several times
    #[arg(long, value_name = "SECTION.KEY")]
    allow_change: Vec<String>,
    /// Write the likeliest tokens of distill.teacher for the training data of the run, and do not train: a file for
    /// distill.logits of other runs
    #[arg(long, value_name = "FILE", conflicts_with = "dry_run")]
    write_top_k: Option<PathBuf>,
    /// Tokens of each position in the file of --write-top-k
    #[arg(long, value_name = "K", default_value_t = 64, requires = "write_top_k")]
    top_k: usize,
    /// Let things go wrong, to try out what becomes of the run: kill:rank3@step20 (its process), hang:rank0@step5,
    /// error:rank1@step7, panic:rank1@step9, lost:rank3@step20 (its device, for good), nan@30, slow:rank1:2x, slow:2x (all ranks), with commas
    /// between them. A restart passes over the first of the list that ends a rank
    #[arg(long, value_name = "FAULTS")]
    inject: Option<Faults>,
    #[command(flatten)]
    layout: LayoutArgs,
    #[command(flatten)]
    overrides: Overrides,
}

impl Args {
    /// Whether nothing is trained.
    pub(super) fn is_dry_run(&self) -> bool {
        self.dry_run
    }
}

/// Runs `train`. Fails if the configuration is wrong or the run cannot start; a run that fails later says so itself.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let mut overrides = args.overrides.with_layout(&args.layout).0;
    overrides.extend(args.trace.map(|file| ("log.trace".to_string(), file)));
    let device = args.device.kind();
    let world = |copy| device.world_size(copy);
    if let Some(config) = ModuleConfig::load_on(args.config.as_deref(), &overrides, &world)? {
        let flags = [
            ("--write-top-k", args.write_top_k.is_some()),
            ("--inject", args.inject.is_some()),
            ("--allow-change", !args.allow_change.is_empty()),
        ];
        let refused = flags.into_iter().find(|(_, given)| *given).map(|(flag, _)| flag);
        let asked = Asked { device, print_config: args.print_config, dry_run: args.dry_run, refused };
        return train_module::run(&config, &asked);
    }
    let config = RunConfig::load_on(args.config.as_deref(), &overrides, &world)?;
    if args.print_config {
        print(&config.to_toml())?;
        return Ok(ExitCode::SUCCESS);
    }
    let inputs: Vec<_> = config.inputs().into_iter().chain(args.config.clone()).collect();
    let (trace, lines) = (&config.log.trace, &config.log.jsonl);
    for (flag, output) in [("--write-top-k", &args.write_top_k), ("log.trace =", trace), ("log.jsonl =", lines)] {
        output.iter().try_for_each(|output| super::is_no_input(flag, output, &inputs))?;
    }
    if let Some(file) = &args.write_top_k {
        alone("train --write-top-k")?;
        let (plan, one) = (Plan::new(&config, &args.allow_change)?, device.devices(&ParallelLayout::default())?);
        let mut display = Display::new();
        let written = write_top_k(&plan, &one[0], file, args.top_k, &mut |progress| display.show(progress));
        display.clear();
        print(&format!("{}: {} tokens a position, {} sequences\n", file.display(), args.top_k, written?))?;
        return Ok(ExitCode::SUCCESS);
    }
    let processes = if args.dry_run { None } else { join(&config, device)? };
    let speaks = processes.as_ref().is_none_or(Processes::is_first);
    let prepare = || -> anyhow::Result<_> {
        let mut plan = Plan::new(&config, &args.allow_change)?;
        plan.faults = args.inject.unwrap_or_default();
        plan.faults.check(config.parallel.world_size(), config.training.steps as u64).map_err(anyhow::Error::msg)?;
        if speaks {
            say(&plan);
            if device == DeviceKind::Cpu {
                let done = plan.start.as_ref().map_or(0, |start| start.step);
                say(format_args!("{:<12} {}", "time", host::estimate(&config, done)));
            }
            if let Some(hint) = hints::lacks_tokenizer(&config) {
                say(format_args!("{:<12} {hint}", "hint"));
            }
        }
        host::check_samples(&config)?;
        // A file for GPUs may be checked on a machine without.
        if device == DeviceKind::Cpu && !(args.dry_run && args.device == DeviceChoice::Auto) {
            let ranks = processes.as_ref().map_or(config.parallel.world_size(), |processes| processes.ranks().len());
            host::check_memory(&config, ranks as f64 / config.parallel.world_size() as f64)?;
        }
        let devices = match &processes {
            _ if args.dry_run => {
                if let Some(hint) = plan.check_tokenizer()? {
                    say(format_args!("{:<12} {hint}", "hint"));
                }
                Vec::new()
            }
            Some(processes) => device.devices_among(processes)?,
            None => device.devices(&config.parallel)?,
        };
        Ok((plan, devices))
    };
    let (plan, devices) = if let Some(processes) = &processes { processes.attempt(prepare)? } else { prepare()? };
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
    let saves = config.checkpoint.directory.is_some();
    let code = match outcome.stopped {
        true if saves => ExitCode::from(STOPPED),
        // Whoever queues the job again would have it from the start, for ever.
        true => ExitCode::FAILURE,
        false => ExitCode::SUCCESS,
    };
    if !speaks {
        return Ok(code);
    }
    if let Some(TokenLoss { loss, tokens, .. }) = outcome.last {
        match config.preference.is_used() {
            true => say(format_args!("held-out loss {loss:.4} over {tokens} examples")),
            false => say(format_args!("held-out loss {loss:.4}, perplexity {:.2} over {tokens} tokens", loss.exp())),
        }
    }
    if outcome.exited {
        say("ended before its last step, as the configuration says; the same command continues the run");
    }
    match outcome.stopped {
        true if saves => say("stopped before its last step; the same command resumes from there"),
        true => say("stopped before its last step; nothing is saved, because checkpoint.directory = none"),
        false => {}
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
    Ok(code)
}
