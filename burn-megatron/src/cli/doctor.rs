//! `burn-megatron doctor`: what can this machine run, and what is missing?

use std::path::Path;
use std::process::ExitCode;

use crate::doctor::{Item, Verdict, gpus, host, summary};

/// Arguments of `doctor`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Also time an all-reduce over all GPUs, and check its sum
    #[arg(long)]
    links: bool,
}

/// Prints a line per item; the exit code is 1 where a run on the machine's GPUs would miss something.
///
/// # Errors
/// If the all-reduce fails.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let show = |items: Vec<Item>| {
        items.iter().for_each(|item| println!("{item}"));
        items
    };
    let mut items = show(host(Path::new(".")));
    let (found, count) = gpus();
    items.extend(show(found));
    let ready = items.iter().all(|item| item.verdict != Verdict::Missing);
    if args.links && ready {
        links(count)?;
    }
    println!("{}", summary(&items, count));
    Ok(if ready { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// 256 MiB, the size of a large gradient bucket.
#[cfg(feature = "cuda")]
const ELEMENTS: usize = 64 << 20;

#[cfg(feature = "cuda")]
fn links(gpus: usize) -> anyhow::Result<()> {
    use burn::tensor::Device;

    if gpus < 2 {
        println!("links    nothing to time: an all-reduce needs two GPUs");
        return Ok(());
    }
    let devices: Vec<Device> = (0..gpus).map(Device::cuda).collect();
    let speed = crate::doctor::link_speed(&devices, ELEMENTS, 20)?;
    println!(
        "links    all-reduce of {} MiB over {gpus} GPUs: {:.2} ms, {:.0} GB/s per link",
        speed.bytes >> 20,
        speed.seconds * 1e3,
        speed.bus / 1e9
    );
    Ok(())
}

#[cfg(not(feature = "cuda"))]
fn links(_: usize) -> anyhow::Result<()> {
    println!("links    nothing to time: no GPU");
    Ok(())
}
