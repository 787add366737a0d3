//! Waits for all that was queued for GPUs, by whoever.

use super::index;
use burn::tensor::Device;
use std::collections::BTreeSet;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// Waits until these GPUs have done all that this process has queued for them: what CubeCL's threads have yet to launch,
/// and the work of every stream, those of communicators and of copies too. Ranks that have failed leave such work behind,
/// and nobody waits for it. Does nothing for CPUs.
///
/// # Errors
/// Names the GPUs that have not within `limit`. One that has failed does nothing any more.
pub fn settle(devices: &[Device], limit: Duration) -> Result<(), String> {
    let busy = unfinished(devices.iter().filter_map(index).collect(), limit, wait_for);
    let names: Vec<String> = busy.iter().map(|gpu| format!("GPU {gpu}")).collect();
    match names.is_empty() {
        true => Ok(()),
        false => Err(format!("{} still at work after {} s", names.join(" and "), limit.as_secs())),
    }
}

/// Those for which `wait`, on a thread each, does not end within `limit`.
fn unfinished(gpus: BTreeSet<usize>, limit: Duration, wait: fn(usize)) -> BTreeSet<usize> {
    let (start, (sender, ended)) = (Instant::now(), mpsc::channel());
    let mut left = gpus;
    for gpu in left.clone() {
        let sender = sender.clone();
        // Without a thread nobody waits, as if it had not ended.
        let _ = thread::Builder::new().name(format!("wait for GPU {gpu}")).spawn(move || {
            wait(gpu);
            sender.send(gpu)
        });
    }
    drop(sender);
    while let Ok(gpu) = ended.recv_timeout(limit.saturating_sub(start.elapsed())) {
        left.remove(&gpu);
    }
    left
}

#[cfg(feature = "cuda")]
use crate::cuda::wait_for;

#[cfg(not(feature = "cuda"))]
fn wait_for(_: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_that_does_not_end_is_named() {
        let all = || BTreeSet::from([0, 1, 2]);
        let hangs = |gpu| {
            if gpu == 1 {
                thread::sleep(Duration::from_secs(3600));
            }
        };
        assert_eq!(unfinished(all(), Duration::from_secs(600), |_| ()), BTreeSet::new());
        let left = unfinished(all(), Duration::from_millis(200), hangs);
        assert!(left.contains(&1) && left.is_subset(&all()), "{left:?}");
        assert_eq!(settle(&[Device::flex()], Duration::ZERO), Ok(()));
    }
}
