//! `burn-megatron replay`: repeat a recorded Megatron-Core run and compare every step.

use std::fmt::Display;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use backend_dist::mesh::ParallelLayout;
use backend_dist::process::Cluster;

use super::device::DeviceKind;
use super::layout::LayoutArgs;
use super::processes::tell;
use crate::config::Precision;
use crate::replay::{Oracle, Replay, layouts, replay};

/// Arguments of `replay`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder with metrics.json, tokens.safetensors, init.safetensors and final.safetensors
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// Precision. The recorded runs are fp32; f64 leaves only their own rounding, with f32 ours comes on top
    #[arg(long, value_enum, default_value = "f64")]
    dtype: Precision,
    /// Where ranks run
    #[arg(long, value_enum, default_value = "cpu")]
    pub(super) device: DeviceKind,
    /// Layouts of more ranks than there are GPUs share them, their collectives going through the host
    #[arg(long)]
    share_gpus: bool,
    /// Several layouts, a line for each: `auto` is every mix of TP, SP, EP, PP, DP and ZeRO on --ranks ranks; otherwise
    /// a list such as "TP2 SP,PP2 DP2 ZeRO1"
    #[arg(long, alias = "layout", value_name = "LIST")]
    layouts: Option<String>,
    /// Ranks of the layouts of `--layouts auto`
    #[arg(long, value_name = "N", default_value_t = 4)]
    ranks: usize,
    #[command(flatten)]
    layout: LayoutArgs,
}

/// Prints the table; the exit code is 1 where a step or a weight differs by more than rounding. Fails if the folder or
/// the layout cannot be run.
pub fn run(args: Args, cluster: &Cluster) -> anyhow::Result<ExitCode> {
    let layout = args.layout.over(ParallelLayout::default())?;
    let oracle = Oracle::load(&args.dir)?;
    let (model, training) = (&oracle.model, &oracle.training);
    let list = args.layouts.as_deref().map(|text| listed(text, &oracle, args.ranks)).transpose()?;
    for layout in list.as_deref().unwrap_or(std::slice::from_ref(&layout)) {
        cluster.local_devices(layout)?;
    }
    let say = |line: &dyn Display| tell(cluster, line);
    say(&format_args!(
        "replaying {} in {}, {:?}: {} layers, width {}, {} steps of {} x {} tokens",
        args.dir.display(),
        list.as_ref().map_or_else(|| layout.to_string(), |list| format!("{} layouts", list.len())),
        args.dtype,
        model.num_layers,
        model.hidden_size,
        oracle.steps.len(),
        training.global_batch_size,
        model.seq_length
    ));
    let one = |layout: &ParallelLayout| -> anyhow::Result<Replay> {
        let cluster = match args.share_gpus {
            true => args.device.shared(cluster)?,
            false => args.device.of_cluster(layout, cluster)?,
        };
        replay(&oracle, layout, args.dtype.into(), &cluster).with_context(|| layout.to_string())
    };
    let Some(list) = list else {
        let replay = one(&layout)?;
        say(&replay);
        return Ok(if replay.passes() { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    };
    let mut equal = 0;
    for layout in &list {
        let replay = one(layout)?;
        equal += usize::from(replay.passes());
        say(&format_args!("{:<18} {}", layout.to_string(), replay.line()));
    }
    say(&format_args!("{equal} of {} layouts equal Megatron's run", list.len()));
    Ok(if equal == list.len() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn listed(text: &str, oracle: &Oracle, ranks: usize) -> anyhow::Result<Vec<ParallelLayout>> {
    let list = match text {
        "auto" => layouts(oracle, ranks)?,
        text => text.split(',').map(|part| parse(part.trim())).collect::<Result<_, _>>()?,
    };
    if list.is_empty() {
        bail!("--layouts {text}: no layout of {ranks} ranks fits the recorded run");
    }
    Ok(list)
}

fn parse(text: &str) -> anyhow::Result<ParallelLayout> {
    let layout: ParallelLayout = text.parse().with_context(|| format!("--layouts \"{text}\""))?;
    layout.check()?;
    Ok(layout)
}
