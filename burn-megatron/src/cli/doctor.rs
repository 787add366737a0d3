//! `burn-megatron doctor`: what this machine can run, and what is missing.

use std::path::Path;
use std::process::ExitCode;

use backend_dist::mesh::ParallelLayout;

use super::device::DeviceKind;
use crate::console::say;
use crate::doctor::{Item, KernelCheck, Verdict, check_kernels, gpus, host, summary};

/// Arguments of `doctor`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Also time an all-reduce over all GPUs and check its result
    #[arg(long)]
    links: bool,
    /// Also compare every GPU kernel on GPU 0 with the CPU in f64
    #[arg(long)]
    kernels: bool,
}

/// Prints a line per item. The exit code is 1 if something is missing for runs on the machine's GPUs, or a kernel is
/// wrong. Fails if the all-reduce fails.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let show = |items: Vec<Item>| {
        items.iter().for_each(say);
        items
    };
    let mut items = show(host(Path::new(".")));
    let (found, count) = gpus();
    items.extend(show(found));
    let ready = items.iter().all(|item| item.verdict != Verdict::Missing);
    if args.links && ready {
        links(count)?;
    }
    let correct = !(args.kernels && ready) || kernels(count)?;
    say(summary(&items, count));
    Ok(if ready && correct { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Prints a line per result; whether all are right.
fn kernels(gpus: usize) -> anyhow::Result<bool> {
    if gpus == 0 {
        say("kernels  nothing to check: no GPU");
        return Ok(true);
    }
    let device = DeviceKind::Cuda.devices(&ParallelLayout::default())?.remove(0);
    say(format_args!("{:<44} {:<6} {:<38} {:>8} {:>8}", "kernel", "type", "shape", "error", "bound"));
    let (mut right, mut all) = (0, 0);
    check_kernels(&device, &mut |check| {
        let KernelCheck { name, dtype, shape, error, bound } = check;
        let verdict = if check.ok() { "ok" } else { "WRONG" };
        say(format_args!("{name:<44} {dtype:<6} {shape:<38} {error:>8.1e} {bound:>8.1e}  {verdict}"));
        (right, all) = (right + usize::from(check.ok()), all + 1);
    });
    say(format_args!("{right} of {all} results are within their bounds"));
    Ok(right == all)
}

/// 256 MiB, the size of a large gradient bucket.
#[cfg(feature = "cuda")]
const ELEMENTS: usize = 64 << 20;

#[cfg(feature = "cuda")]
fn links(gpus: usize) -> anyhow::Result<()> {
    use burn::tensor::Device;

    if gpus < 2 {
        say("links    nothing to time: an all-reduce needs two GPUs");
        return Ok(());
    }
    let devices: Vec<Device> = (0..gpus).map(Device::cuda).collect();
    let speed = crate::doctor::link_speed(&devices, ELEMENTS, 20)?;
    say(format_args!(
        "links    all-reduce of {} MiB over {gpus} GPUs: {:.2} ms, {:.0} GB/s per link",
        speed.bytes >> 20,
        speed.seconds * 1e3,
        speed.bus / 1e9
    ));
    Ok(())
}

#[cfg(not(feature = "cuda"))]
fn links(_: usize) -> anyhow::Result<()> {
    say("links    nothing to time: no GPU");
    Ok(())
}
