//! `burn-megatron bench`: how fast a run trains, in one table.

mod listed;
mod subject;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use backend_dist::gpu::{self, GpuInfo};

use listed::{layout_ranks, listed, of_layout};
use subject::{config, data};

use super::device::Place;
use super::hints;
use super::layout::LayoutArgs;
use super::overrides::Overrides;
use super::print;
use super::processes::alone;
use crate::bench::{
    Device, DocumentLengths, DocumentReport, Record, Setup, Timing, announcement, markdown, measure, profile, text,
    together,
};
use crate::config::RunConfig;
use crate::console::say;
use crate::data::TokenDataset;
use crate::plan::gpus::Gpu;
use crate::plan::ladder;
use crate::trace::summary_file;

/// Arguments of `bench`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Every key of a configuration is also a flag: --SECTION.KEY VALUE, for example \
                        --training.micro-batch 2. Tokens are random unless data.text or data.prefixes names some. \
                        benchmarks/README.md says what the numbers mean.")]
pub struct Args {
    /// llama3-8b, llama3-1b, tiny, or a run's TOML file
    #[arg(value_name = "RECIPE|RUN.toml", default_value = "tiny")]
    what: String,
    /// Where ranks run
    #[arg(long, value_enum, default_value = "cpu")]
    device: Place,
    /// Ranks of a recipe; by default all GPUs, or two CPU ranks
    #[arg(long, value_name = "N")]
    gpus: Option<usize>,
    /// Several layouts, one after the other, a line of the table for each: a list such as "DP2 ZeRO1,TP2 SP". Without
    /// ZeRO a recipe takes the first stage that fits, as it does without flags. "CP2 dynamic:16384" shares documents by
    /// their length, with at most so many tokens on a rank
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    layouts: Vec<String>,
    /// Cut random tokens into documents of random lengths, the same in every run: lognormal:MEAN,SIGMA, of which
    /// lognormal:4096,1.1 is skewed as texts are
    #[arg(long, value_name = "DISTRIBUTION")]
    document_lengths: Option<DocumentLengths>,
    /// Steps of a run
    #[arg(long, value_name = "N", default_value_t = 20)]
    steps: usize,
    /// Steps before the first run
    #[arg(long, value_name = "N", default_value_t = 5)]
    warmup: usize,
    /// Runs, one after the other
    #[arg(long, value_name = "N", default_value_t = 3)]
    runs: usize,
    /// After the runs, profile N steps on all GPUs: every operation and kernel, its rate and what the card could do
    #[arg(long, value_name = "N", num_args = 0..=1, require_equals = true, default_missing_value = "2")]
    profile: Option<usize>,
    /// Measure nothing and use no GPU: say what would be trained, what memory the plan expects, and how well each way
    /// of dealing documents out would use the ranks
    #[arg(long, conflicts_with_all = ["profile", "out"])]
    dry_run: bool,
    /// File for the JSON record, beside which a Markdown row and a profile's rows are written; by default in
    /// runs/bench. Of several layouts each has its own, named after it
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    #[command(flatten)]
    layout: LayoutArgs,
    #[command(flatten)]
    overrides: Overrides,
}

/// Runs `bench`.
///
/// # Errors
/// If a run is not one, does not fit, or fails; the layouts before it have been measured and written.
pub fn run(args: Args) -> Result<ExitCode> {
    alone("bench")?;
    let timing =
        Timing { warmup: args.warmup, steps: args.steps, runs: args.runs, profile: args.profile.unwrap_or_default() };
    for (flag, value) in [("warmup", timing.warmup), ("steps", timing.steps), ("runs", timing.runs)] {
        if value == 0 {
            bail!("--{flag} 0 measures nothing; nearest legal: 1");
        }
    }
    if args.profile.is_some() && args.device == Place::Cpu {
        bail!("--profile is of GPUs: add --device cuda, or leave it out");
    }
    let gpus = if args.device == Place::Cpu || args.dry_run { Vec::new() } else { gpu::gpus()? };
    let overrides = args.overrides.clone().with_layout(&args.layout).0;
    if args.gpus.is_some() && Path::new(&args.what).is_file() {
        bail!("--gpus is for recipes; the layout of {} says how many ranks there are", args.what);
    }
    if args.layouts.is_empty() {
        let (ranks, out) = (args.gpus.or_else(|| layout_ranks(&args.layout)), args.out.clone());
        let config = config(&args.what, &overrides, ranks, timing, &gpus)?;
        possible(&config, || data(&config, timing, args.document_lengths), timing)?;
        match args.dry_run {
            true => announce(&args, &config, timing)?,
            false => drop(one(&args, config, timing, &gpus, out)?),
        }
        return Ok(ExitCode::SUCCESS);
    }
    if args.layout != LayoutArgs::default() {
        bail!("--layouts says all about the layouts: leave the layout flags out");
    }
    // All are looked at before the first is run.
    let resolve = |text: &String| -> Result<RunConfig> {
        let (layout, keys) = listed(text)?;
        if let Some(gpus) = args.gpus.filter(|gpus| *gpus != layout.world_size()) {
            bail!("--layouts \"{text}\" has {} ranks, not --gpus {gpus}: leave --gpus out", layout.world_size());
        }
        let keys = [overrides.clone(), keys].concat();
        config(&args.what, &keys, Some(layout.world_size()), timing, &gpus)
            .with_context(|| format!("--layouts \"{text}\""))
    };
    let configs = args.layouts.iter().map(resolve).collect::<Result<Vec<_>>>()?;
    for (config, layout) in configs.iter().zip(&args.layouts) {
        let data = || data(config, timing, args.document_lengths);
        possible(config, data, timing).with_context(|| format!("--layouts \"{layout}\""))?;
    }
    if args.dry_run {
        for (index, config) in configs.iter().enumerate() {
            print(if index > 0 { "\n" } else { "" })?;
            announce(&args, config, timing)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let mut records = Vec::new();
    for (index, config) in configs.into_iter().enumerate() {
        let out = args.out.as_ref().map(|out| of_layout(out, &args.layouts[index]));
        let record = one(&args, config, timing, &gpus, out);
        records.push(record.with_context(|| format!("--layouts \"{}\"", args.layouts[index]))?);
        print(&format!("\n{}\n", together(&records)))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Says what would be measured.
fn announce(args: &Args, config: &RunConfig, timing: Timing) -> Result<()> {
    let (data, described) = data(config, timing, args.document_lengths)?;
    let (job, on_gpus) = (config.job()?, args.device != Place::Cpu);
    let planned = ladder::peak(&if on_gpus { job.on_gpus() } else { job });
    let documents = documents(config, &*data, timing, on_gpus);
    let setup = Setup::of(&args.what, config, &described);
    print(&format!("{}, {} parameters\n", setup.recipe, setup.parameters))?;
    print(&announcement(&setup, planned, documents.as_ref()))?;
    hint(args, config);
    if on_gpus && !Path::new(&args.what).is_file() {
        say(format_args!(
            "{:<22}no GPU was asked for its memory: nothing is given up for it, as it would be in a run",
            ""
        ));
    }
    Ok(())
}

/// Says what would be quicker on GPUs.
fn hint(args: &Args, config: &RunConfig) {
    if let Some(hint) = (args.device == Place::Cuda).then(|| hints::of(config)).flatten() {
        say(format_args!("{:<22}{hint}", "hint"));
    }
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

/// Those of the steps that are measured.
fn documents(config: &RunConfig, data: &dyn TokenDataset, timing: Timing, on_gpus: bool) -> Option<DocumentReport> {
    let (first, steps) = (timing.warmup * config.training.global_batch, timing.runs * timing.steps);
    DocumentReport::of(config, data, first, steps, on_gpus)
}

/// Measures a run, prints and writes what was found.
fn one(args: &Args, config: RunConfig, timing: Timing, gpus: &[GpuInfo], out: Option<PathBuf>) -> Result<Record> {
    let (data, described) = data(&config, timing, args.document_lengths)?;
    let setup = Setup::of(&args.what, &config, &described);
    let job = config.job()?;
    let planned = ladder::peak(&if gpus.is_empty() { job } else { job.on_gpus() });
    say(format_args!("{}: {} on {} ranks, {} parameters", setup.recipe, setup.layout, setup.ranks, setup.parameters));
    hint(args, &config);
    let total = timing.total();
    let told = |step: usize, loss: f64, seconds: f64| {
        eprintln!("step {step}/{total}, loss {loss:.4}, {seconds:.3} s");
    };
    let devices = args.device.devices(&config.parallel)?;
    let seen = measure(&config, data.clone(), devices, timing, &told).map_err(|error| anyhow!(error))?;
    let documents = documents(&config, &*data, timing, !gpus.is_empty());
    let device = device(gpus.first(), &config);
    let record = Record::new(&config, setup, device, timing, planned, documents, seen);
    print(&format!("\n{}", text(&record)))?;
    let file = save(&record, out)?;
    say(format_args!("{:<22}{}", "written to", file.display()));
    if let Some(trace) = &config.log.trace {
        let overlap = fs::read_to_string(summary_file(trace)).unwrap_or_default();
        print(&format!("{:<22}{}\n{overlap}", "timeline", trace.display()))?;
    }
    if let Some(report) = &record.profile {
        print(&format!("\n{}", profile::text(report)))?;
        let file = file.with_extension("profile.csv");
        write(&file, &profile::csv(report))?;
        say(format_args!("{:<22}{}", "written to", file.display()));
    }
    Ok(record)
}

fn device(gpu: Option<&GpuInfo>, config: &RunConfig) -> Device {
    let Some(gpu) = gpu else { return Device { name: "CPU rank".into(), ..Device::default() } };
    let mut versions = Vec::new();
    if let Ok(driver) = gpu::driver_version() {
        let number = driver.driver.unwrap_or_else(|| "not known".into());
        versions.push(("driver, CUDA".to_string(), format!("{number}, {}", driver.cuda)));
    }
    let libraries = [("NCCL", gpu::nccl_version()), ("cuBLASLt", gpu::cublas_lt_version())];
    versions.extend(libraries.into_iter().filter_map(|(name, version)| Some((name.into(), version.ok()?.to_string()))));
    let sheet = Gpu::named(&gpu.name);
    Device {
        peak: sheet.map(|sheet| sheet.peak(config.training.dtype.bytes())),
        source: sheet.map(|sheet| sheet.source.into()),
        name: gpu.name.clone(),
        versions,
    }
}

/// Writes the record as JSON and, beside it, its row of the table of results. Returns the first.
fn save(record: &Record, out: Option<PathBuf>) -> Result<PathBuf> {
    let file = out.unwrap_or_else(|| {
        let stamp: String = record.origin.date.chars().filter(char::is_ascii_digit).collect();
        let recipe = Path::new(&record.setup.recipe).file_stem().unwrap_or_default().to_string_lossy();
        PathBuf::from(format!("runs/bench/{stamp}-{recipe}-{}.json", record.setup.ranks))
    });
    write(&file, &(serde_json::to_string_pretty(record)? + "\n"))?;
    write(&file.with_extension("md"), &markdown(record, true))?;
    Ok(file)
}

fn write(path: &Path, text: &str) -> Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    let written = fs::File::create(path).and_then(|mut file| file.write_all(text.as_bytes()));
    written.with_context(|| path.display().to_string())
}
