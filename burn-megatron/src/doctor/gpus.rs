//! The GPUs and what runs on them load.

use super::{Item, Verdict, bytes};
use backend_dist::gpu::{self, GpuError, GpuInfo};
use std::path::Path;

/// Driver, GPUs, libraries and links, and the number of GPUs. Where the machine has no NVIDIA GPU, nothing is missing.
pub fn gpus() -> (Vec<Item>, usize) {
    let present = has_gpu(Path::new("/sys/bus/pci/devices"));
    let gpus = match gpu::gpus() {
        Ok(gpus) => gpus,
        Err(error) => return (vec![without(&error, present)], 0),
    };
    let mut items = vec![driver()];
    items.extend(gpus.iter().map(one));
    items.push(cublas_lt());
    items.push(nccl(gpus.len()));
    items.push(Item::of("libdevice", gpu::libdevice().map(|path| path.display().to_string())));
    if gpus.len() > 1 {
        items.push(peers(&gpus));
    }
    (items, gpus.len())
}

/// The verdict where no GPU can be used: only a machine that has one misses something.
fn without(error: &GpuError, present: bool) -> Item {
    match present {
        true => Item::new(Verdict::Missing, "GPUs", format!("this machine has an NVIDIA GPU, but {error}")),
        false => Item::new(Verdict::Note, "GPUs", format!("none found ({error})")),
    }
}

/// Whether the PCI bus has a display or 3-D controller (class 03) of NVIDIA (vendor 10de), with or without a driver.
fn has_gpu(bus: &Path) -> bool {
    let read = |path: &Path, name: &str| std::fs::read_to_string(path.join(name)).unwrap_or_default();
    let is_gpu = |path: &Path| read(path, "vendor").starts_with("0x10de") && read(path, "class").starts_with("0x03");
    std::fs::read_dir(bus).is_ok_and(|list| list.flatten().any(|entry| is_gpu(&entry.path())))
}

fn driver() -> Item {
    Item::of(
        "driver",
        gpu::driver_version().map(|version| {
            let name = version.driver.unwrap_or_else(|| "version unknown (no NVML: libnvidia-ml.so.1)".into());
            format!("{name}, CUDA {}.{}", version.cuda.major, version.cuda.minor)
        }),
    )
}

/// A library of a newer major version than the driver's CUDA loads, and fails at its first call.
fn cublas_lt() -> Item {
    let item = Item::of("cuBLASLt", gpu::cublas_lt_version());
    match (gpu::cublas_lt_version(), gpu::driver_version()) {
        (Ok(library), Ok(driver)) if library.major > driver.cuda.major => Item::new(
            Verdict::Missing,
            "cuBLASLt",
            format!(
                "{library}, but the driver runs CUDA {} at most: install an older one or a newer driver",
                driver.cuda.major
            ),
        ),
        _ => item,
    }
}

/// One process can do without NCCL as long as it uses one GPU.
fn nccl(gpus: usize) -> Item {
    let item = Item::of("NCCL", gpu::nccl_version());
    match item.verdict {
        Verdict::Missing if gpus == 1 => Item { verdict: Verdict::Note, ..item },
        _ => item,
    }
}

/// More than this share in use by others is worth a note.
const BUSY: f64 = 0.05;

fn one(gpu: &GpuInfo) -> Item {
    let (major, minor) = gpu.capability;
    let mut text = format!("{}, {major}.{minor}, {} SMs, {}", gpu.name, gpu.processors, bytes(gpu.total));
    let mut verdict = Verdict::Good;
    match gpu.memory() {
        Ok(memory) => {
            text += &format!(" ({} in use)", bytes(memory.used()));
            if memory.used() as f64 > BUSY * memory.total as f64 {
                verdict = Verdict::Note;
                text += ": another program uses it";
            }
        }
        Err(error) => text += &format!(" (in use: {error})"),
    }
    let readings = gpu.readings();
    if let (Some(clock), Some(max)) = (readings.clock, readings.max_clock) {
        text += &format!(", {clock} of {max} MHz");
    }
    if let (Some(power), Some(limit)) = (readings.power, readings.power_limit) {
        text += &format!(", {power:.0} of {limit:.0} W");
    }
    if let Some(temperature) = readings.temperature {
        text += &format!(", {temperature} °C");
    }
    if let Some(links) = readings.nvlinks {
        text += &format!(", {links} NVLinks");
    }
    if major < 8 {
        verdict = Verdict::Missing;
        text += ": bf16 needs compute capability 8.0 or more";
    }
    Item::new(verdict, format!("GPU {}", gpu.index), text)
}

/// Whether every GPU reaches every other one's memory.
fn peers(gpus: &[GpuInfo]) -> Item {
    let pairs = || gpus.iter().flat_map(|a| gpus.iter().map(move |b| (a.index, b.index))).filter(|(a, b)| a != b);
    let apart: Vec<(usize, usize)> = pairs().filter(|(a, b)| !gpu::reaches(*a, *b).unwrap_or(false)).collect();
    match apart.first() {
        None => Item::new(Verdict::Good, "peer access", "every GPU reaches every other one's memory"),
        Some((a, b)) => Item::new(
            Verdict::Note,
            "peer access",
            format!(
                "{} pairs of GPUs communicate through the host, GPU {a} and GPU {b} first: collectives are slow",
                apart.len()
            ),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_machine_with_a_gpu_misses_its_driver() {
        let folder = tempfile::tempdir().unwrap();
        let device = |name: &str, vendor: &str, class: &str| {
            let path = folder.path().join(name);
            std::fs::create_dir(&path).unwrap();
            std::fs::write(path.join("vendor"), vendor).unwrap();
            std::fs::write(path.join("class"), class).unwrap();
        };
        device("0000:00:01.0", "0x8086\n", "0x030000\n");
        // NVIDIA's NVSwitch is a bridge.
        device("0000:00:02.0", "0x10de\n", "0x068000\n");
        assert!(!has_gpu(folder.path()));
        device("0000:00:03.0", "0x10de\n", "0x030200\n");
        assert!(has_gpu(folder.path()));
        assert_eq!(without(&GpuError::NotBuilt, false).verdict, Verdict::Note);
        let item = without(&GpuError::NotBuilt, true);
        assert!(item.verdict == Verdict::Missing && item.found.contains("--features cuda"), "{item}");
    }
}
