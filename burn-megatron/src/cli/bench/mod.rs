//! `burn-megatron bench`: how fast a run trains, in one table.

mod listed;
mod output;
mod subject;

use std::fmt::Display;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use backend_dist::gpu::{self, GpuInfo};
use backend_dist::process::Cluster;

use listed::{layout_ranks, listed, of_layout};
use output::{check_writable, device, draw, save, write};
use subject::{Ranks, config, data};

use super::device::{DeviceChoice, DeviceKind};
use super::host;
use super::layout::LayoutArgs;
use super::overrides::Overrides;
use super::processes::tell;
use super::{is_no_input, print};
use crate::bench::{
    DocumentLengths, DocumentReport, Record, Setup, Timing, announcement, measure, profile, text, together,
};
use crate::config::RunConfig;
use crate::console::warn;
use crate::data::TokenDataset;
use crate::plan::ladder;
use crate::trace::summary_file;

/// Arguments of `bench`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Every key of a configuration is also a flag: --SECTION.KEY VALUE, for example \
                        --training.micro-batch 2. Tokens are random unless data.text or data.prefixes names some. \
                        benchmarks/README.md says what the numbers mean.")]
pub struct Args {
    /// Recipe (llama3-8b, llama3-1b, tiny) or TOML file of a run; with --chart a record
    #[arg(value_name = "RECIPE|RUN.toml", default_value = "tiny")]
    what: String,
    /// With --chart: further records, and lists of other systems' measurements
    #[arg(value_name = "FILE", requires = "chart")]
    files: Vec<PathBuf>,
    /// Measure nothing: draw a bar chart of records and other systems' measurements into this SVG file
    #[arg(long, value_name = "FILE", conflicts_with_all = ["dry_run", "profile", "out", "layouts", "gpus"])]
    chart: Option<PathBuf>,
    /// Device of the ranks
    #[arg(long, value_enum, default_value = "auto")]
    pub(super) device: DeviceChoice,
    /// Ranks of a recipe; by default all GPUs, or two CPU ranks
    #[arg(long, value_name = "N")]
    gpus: Option<usize>,
    /// Measure several layouts, one after the other, and compare them in one table: a list such as "DP2 ZeRO1,TP2 SP".
    /// If a layout names no ZeRO stage, a recipe uses the first stage that fits. "CP2 dynamic:16384" is dynamic context
    /// parallelism with at most 16384 tokens per rank
    #[arg(long, alias = "layout", value_name = "LIST", value_delimiter = ',')]
    layouts: Vec<String>,
    /// Divide the random tokens into documents of random lengths, the same in every run: lognormal:MEAN,SIGMA, for
    /// example lognormal:4096,1.1
    #[arg(long, value_name = "DISTRIBUTION")]
    document_lengths: Option<DocumentLengths>,
    /// Measured steps per run
    #[arg(long, value_name = "N", default_value_t = 20)]
    steps: usize,
    /// Warm-up steps before the first run
    #[arg(long, value_name = "N", default_value_t = 5)]
    warmup: usize,
    /// Number of runs; the median is reported
    #[arg(long, value_name = "N", default_value_t = 3)]
    runs: usize,
    /// After the runs, profile N steps on all GPUs: time and rate of every operation and kernel, and the GPU's peak
    #[arg(long, value_name = "N", num_args = 0..=1, require_equals = true, default_missing_value = "2")]
    profile: Option<usize>,
    /// Measure nothing and use no GPU: print the run, its memory by plan, and how evenly each assignment of documents
    /// would load the ranks
    #[arg(long, conflicts_with_all = ["profile", "out"])]
    dry_run: bool,
    /// File of the JSON record; a Markdown row and a profile's table get the same name. Each of several layouts has a
    /// file of its own, named after it [default: in runs/bench]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    #[command(flatten)]
    layout: LayoutArgs,
    #[command(flatten)]
    overrides: Overrides,
}

/// Runs `bench`. Fails if a run is not one, does not fit, or fails; the layouts before it have been measured and
/// written.
pub fn run(args: Args, cluster: &Cluster) -> Result<ExitCode> {
    if let Some(file) = &args.chart {
        let files: Vec<&Path> = std::iter::once(Path::new(&args.what)).chain(args.files.iter().map(|f| &**f)).collect();
        is_no_input("--chart", file, &files)?;
        return if cluster.is_first() { draw(file, &files) } else { Ok(ExitCode::SUCCESS) };
    }
    args.out.iter().try_for_each(|out| is_no_input("--out", out, &[&args.what]))?;
    let timing =
        Timing { warmup: args.warmup, steps: args.steps, runs: args.runs, profile: args.profile.unwrap_or_default() };
    let numbers = [("warmup", timing.warmup), ("steps", timing.steps), ("runs", timing.runs)];
    for (flag, value) in numbers {
        if value == 0 {
            bail!("--{flag} 0 measures nothing; nearest legal: 1");
        }
        if value > MOST_STEPS {
            bail!("--{flag} {value} is more than can be measured; nearest legal: {MOST_STEPS}");
        }
    }
    if let Some(steps) = args.profile.filter(|steps| *steps > MOST_STEPS) {
        bail!("--profile={steps} is more than can be measured; nearest legal: {MOST_STEPS}");
    }
    let device = args.device.kind();
    if args.profile.is_some() && device == DeviceKind::Cpu {
        bail!("--profile works on GPUs only: add --device cuda, or leave it out");
    }
    let gpus = if device == DeviceKind::Cpu || args.dry_run { Vec::new() } else { gpu::gpus()? };
    let here = Ranks::of(cluster, &gpus)?;
    let overrides = args.overrides.clone().with_layout(&args.layout).0;
    if args.gpus.is_some() && Path::new(&args.what).is_file() {
        bail!("--gpus is for recipes; the number of ranks follows from the layout of {}", args.what);
    }
    if cluster.is_first() && !args.dry_run {
        check_writable(args.out.as_deref().unwrap_or(Path::new("runs/bench/record.json")))?;
    }
    if args.layouts.is_empty() {
        let (ranks, out) = (args.gpus.or_else(|| layout_ranks(&args.layout)), args.out.clone());
        let config = config(&args.what, &overrides, ranks, timing, here)?;
        out.iter().try_for_each(|out| is_no_input("--out", out, &config.inputs()))?;
        cluster.local_devices(&config.parallel)?;
        possible(&config, || data(&config, timing, args.document_lengths, cluster), timing)?;
        match args.dry_run {
            true => announce(&args, &config, timing, cluster)?,
            false => drop(one(&args, config, timing, (&gpus, cluster), out)?),
        }
        return Ok(ExitCode::SUCCESS);
    }
    if args.layout != LayoutArgs::default() {
        bail!("--layouts and layout flags exclude each other: leave one out");
    }
    // All are checked before the first is measured.
    let resolve = |text: &String| -> Result<RunConfig> {
        let (layout, keys) = listed(text)?;
        if let Some(gpus) = args.gpus.filter(|gpus| *gpus != layout.world_size()) {
            bail!("--layouts \"{text}\" has {} ranks, not --gpus {gpus}: leave --gpus out", layout.world_size());
        }
        let keys = [overrides.clone(), keys].concat();
        cluster.local_devices(&layout).with_context(|| format!("--layouts \"{text}\""))?;
        config(&args.what, &keys, Some(layout.world_size()), timing, here)
            .with_context(|| format!("--layouts \"{text}\""))
    };
    let configs = args.layouts.iter().map(resolve).collect::<Result<Vec<_>>>()?;
    for (config, layout) in configs.iter().zip(&args.layouts) {
        let data = || data(config, timing, args.document_lengths, cluster);
        possible(config, data, timing).with_context(|| format!("--layouts \"{layout}\""))?;
    }
    if args.dry_run {
        for (index, config) in configs.iter().enumerate() {
            if index > 0 {
                tell(cluster, "");
            }
            announce(&args, config, timing, cluster)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let mut records = Vec::new();
    for (index, config) in configs.into_iter().enumerate() {
        let out = args.out.as_ref().map(|out| of_layout(out, &args.layouts[index]));
        let record = one(&args, config, timing, (&gpus, cluster), out);
        records.extend(record.with_context(|| format!("--layouts \"{}\"", args.layouts[index]))?);
        if cluster.is_first() {
            print(&format!("\n{}\n", together(&records)))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Steps, and runs, whose number times each other stays far from overflowing.
const MOST_STEPS: usize = 1 << 20;

/// Prints what would be measured.
fn announce(args: &Args, config: &RunConfig, timing: Timing, cluster: &Cluster) -> Result<()> {
    let (data, described) = data(config, timing, args.document_lengths, cluster)?;
    if !cluster.is_first() {
        return Ok(());
    }
    let (job, on_gpus) = (config.job()?, args.device.kind() != DeviceKind::Cpu);
    let planned = ladder::peak(&if on_gpus { job.on_gpus() } else { job });
    let documents = documents(config, &*data, timing, on_gpus);
    let setup = Setup::of(&args.what, config, &described);
    print(&format!("{}, {} parameters\n", setup.recipe, setup.parameters))?;
    print(&announcement(&setup, planned, documents.as_ref()))?;
    if on_gpus && !Path::new(&args.what).is_file() {
        let why = format_args!(
            "{:<22}without a GPU no ZeRO stage or recomputation is chosen by its memory, as a measurement does",
            ""
        );
        tell(cluster, why);
    }
    Ok(())
}

/// Refuses documents that are too long for all ranks together before anything starts.
fn possible(
    config: &RunConfig,
    data: impl FnOnce() -> Result<(Arc<dyn TokenDataset>, String)>,
    timing: Timing,
) -> Result<()> {
    if config.context.dynamic {
        DocumentReport::check(config, &*data()?.0, timing.total())?;
    }
    Ok(())
}

/// The documents of the measured steps.
fn documents(config: &RunConfig, data: &dyn TokenDataset, timing: Timing, on_gpus: bool) -> Option<DocumentReport> {
    let (first, steps) = (timing.warmup * config.training.global_batch, timing.runs * timing.steps);
    DocumentReport::of(config, data, first, steps, on_gpus)
}

/// Measures a run in all processes; the first prints and writes the record.
fn one(
    args: &Args,
    config: RunConfig,
    timing: Timing,
    (gpus, cluster): (&[GpuInfo], &Cluster),
    out: Option<PathBuf>,
) -> Result<Option<Record>> {
    let say = |line: &dyn Display| tell(cluster, line);
    let (data, described) = data(&config, timing, args.document_lengths, cluster)?;
    let setup = Setup::of(&args.what, &config, &described);
    let job = config.job()?;
    let planned = ladder::peak(&if gpus.is_empty() { job } else { job.on_gpus() });
    say(&format_args!("{}: {} on {} ranks, {} parameters", setup.recipe, setup.layout, setup.ranks, setup.parameters));
    let total = timing.total();
    let told = |step: usize, loss: f64, seconds: f64| {
        warn(format_args!("step {step}/{total}, loss {loss:.4}, {seconds:.3} s"));
    };
    if gpus.is_empty() {
        host::check_memory(&config, 1.0 / cluster.count() as f64)?;
    }
    let on = args.device.kind().of_cluster(&config.parallel, cluster)?;
    let seen = measure(&config, data.clone(), &on, timing, &told).map_err(|error| anyhow!(error))?;
    if !cluster.is_first() {
        return Ok(None);
    }
    let documents = documents(&config, &*data, timing, !gpus.is_empty());
    let device = device(gpus.first(), &config);
    let record = Record::new(&config, setup, device, timing, planned, documents, seen);
    print(&format!("\n{}", text(&record)))?;
    let file = save(&record, out)?;
    say(&format_args!("{:<22}{}", "written to", file.display()));
    if let Some(trace) = &config.log.trace {
        let overlap = fs::read_to_string(summary_file(trace)).unwrap_or_default();
        print(&format!("{:<22}{}\n{overlap}", "timeline", trace.display()))?;
    }
    if let Some(report) = &record.profile {
        print(&format!("\n{}", profile::text(report)))?;
        let file = file.with_extension("profile.csv");
        write(&file, &profile::csv(report))?;
        say(&format_args!("{:<22}{}", "written to", file.display()));
    }
    Ok(Some(record))
}
