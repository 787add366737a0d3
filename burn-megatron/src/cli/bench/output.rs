//! The results of `bench`: the device of a record, its files, and the chart.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use backend_dist::gpu::{self, GpuInfo};
use host::partial_file::partial;

use crate::bench::{Device, Record, chart, markdown};
use crate::cli::refused;
use crate::config::RunConfig;
use crate::console::say;
use crate::plan::gpus::GpuModel;
use crate::refusal::Access;

/// Draws the measurements of the files into an SVG file.
pub(super) fn draw(file: &Path, files: &[&Path]) -> Result<ExitCode> {
    let mut all = Vec::new();
    for file in files {
        let text = fs::read_to_string(file).map_err(refused(Access::Read, file))?;
        let what = || format!("{} is neither a record nor a list of measurements", file.display());
        all.extend(chart::measurements(&text).with_context(what)?);
    }
    let chart = chart::svg(&all).context(
        "--chart: nothing to compare: no setup (model, sequence length, precision, GPUs) is in a record of ours and in a list of \
         other systems' measurements; name both, as benchmarks/README.md does",
    )?;
    write(file, &chart)?;
    say(format_args!("{:<22}{}", "written to", file.display()));
    Ok(ExitCode::SUCCESS)
}

pub(super) fn device(gpu: Option<&GpuInfo>, config: &RunConfig) -> Device {
    let Some(gpu) = gpu else { return Device { name: "CPU rank".into(), ..Device::default() } };
    let mut versions = Vec::new();
    if let Ok(driver) = gpu::driver_version() {
        let number = driver.driver.unwrap_or_else(|| "not known".into());
        versions.push(("driver, CUDA".to_string(), format!("{number}, {}", driver.cuda)));
    }
    let libraries = [("NCCL", gpu::nccl_version()), ("cuBLASLt", gpu::cublas_lt_version())];
    versions.extend(libraries.into_iter().filter_map(|(name, version)| Some((name.into(), version.ok()?.to_string()))));
    let sheet = GpuModel::named(&gpu.name);
    Device {
        peak: sheet.map(|sheet| sheet.peak(config.training.dtype.bytes())),
        source: sheet.map(|sheet| sheet.source.into()),
        name: gpu.name.clone(),
        versions,
    }
}

/// Writes the record as JSON, and its row of the table of results next to it. Returns the path of the JSON file.
pub(super) fn save(record: &Record, out: Option<PathBuf>) -> Result<PathBuf> {
    let file = out.unwrap_or_else(|| {
        let stamp: String = record.origin.date.chars().filter(char::is_ascii_digit).collect();
        let recipe = Path::new(&record.setup.recipe).file_stem().unwrap_or_default().to_string_lossy();
        PathBuf::from(format!("runs/bench/{stamp}-{recipe}-{}.json", record.setup.ranks))
    });
    write(&file, &(serde_json::to_string_pretty(record)? + "\n"))?;
    write(&file.with_extension("md"), &markdown(record))?;
    Ok(file)
}

/// Whether a file can be written there, before anything is measured.
pub(super) fn check_writable(path: &Path) -> Result<()> {
    make_folder(path)?;
    partial(path).map(drop).map_err(refused(Access::Write, path))
}

fn make_folder(path: &Path) -> Result<()> {
    path.parent().map_or(Ok(()), |folder| fs::create_dir_all(folder).map_err(refused(Access::Write, folder)))
}

pub(super) fn write(path: &Path, text: &str) -> Result<()> {
    make_folder(path)?;
    let written = fs::File::create(path).and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(refused(Access::Write, path))
}
