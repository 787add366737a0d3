//! `verify --curve`: losses of many steps in one precision.

use std::process::ExitCode;

use anyhow::Context;
use models::CausalLm;

use super::flags::Words;
use super::layouts::layouts;
use super::{Run, devices};
use crate::cli::processes::tell;
use crate::verify::{Candidate, Settings, curve};

/// Prints a line per layout.
pub(super) fn run_curve<M: CausalLm>(run: &Run, config: &M::Config, settings: &Settings) -> anyhow::Result<ExitCode> {
    let args = run.args;
    let list = match args.layouts.is_empty() {
        true => vec![Candidate::default()],
        false => layouts(args, run.family, settings, run.cluster)?.tried,
    };
    let cluster = devices(args, &list, run.cluster)?;
    let mut equal = true;
    for candidate in &list {
        let curve =
            curve::<M>(config, settings, &cluster, candidate).with_context(|| format!("--layout \"{candidate}\""))?;
        tell(&cluster, format_args!("{candidate} on {}, {}: {curve}", Words(args.device), Words(args.dtype)));
        equal &= curve.passes();
    }
    Ok(if equal { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
