//! Waits for all that was queued for GPUs, by whoever, and frees what is left there.

use super::index;
use burn::tensor::Device;
use std::collections::BTreeSet;
use std::fmt::Display;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// What is done to the GPU with this index, which may take forever.
type Work = fn(usize) -> Result<(), String>;

/// Waits until these GPUs have done all that this process has queued for them: what CubeCL's threads have yet to launch,
/// and the work of every stream, those of communicators and of copies too. Ranks that have failed leave such work behind,
/// and nobody waits for it. Then returns to the driver the memory that only threads that have ended have used, so that
/// others find as much as in a new process. Does nothing for CPUs.
///
/// # Errors
/// Names the GPUs that have failed, and those that have not done it within `limit`. Then nothing is freed.
pub fn settle(devices: &[Device], limit: Duration) -> Result<(), String> {
    settled(&devices.iter().filter_map(index).collect(), limit, wait_for, vacate)
}

/// No GPU is vacated before all have done what others may wait for: they read each other's memory.
fn settled(gpus: &BTreeSet<usize>, limit: Duration, wait: Work, vacate: Work) -> Result<(), String> {
    on_each(gpus, limit, "at work", wait)?;
    on_each(gpus, limit, "freeing memory", vacate)
}

/// `work` for each GPU, on a thread each. Fails for those whose work fails or does not end within `limit`.
fn on_each(gpus: &BTreeSet<usize>, limit: Duration, doing: &str, work: Work) -> Result<(), String> {
    let (start, (sender, ended)) = (Instant::now(), mpsc::channel());
    for &gpu in gpus {
        let sender = sender.clone();
        // Without a thread nobody works, as if it had not ended.
        let _ = thread::Builder::new().name(format!("settle GPU {gpu}")).spawn(move || sender.send((gpu, work(gpu))));
    }
    drop(sender);
    let (mut busy, mut wrong) = (gpus.clone(), Vec::new());
    while let Ok((gpu, outcome)) = ended.recv_timeout(limit.saturating_sub(start.elapsed())) {
        busy.remove(&gpu);
        wrong.extend(outcome.err().map(|error| format!("GPU {gpu}: {error}")));
    }
    if !busy.is_empty() {
        wrong.push(format!("{} still {doing} after {} s", named(&busy), limit.as_secs()));
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("; ")) }
}

fn named(gpus: &BTreeSet<usize>) -> impl Display {
    gpus.iter().map(|gpu| format!("GPU {gpu}")).collect::<Vec<_>>().join(" and ")
}

#[cfg(feature = "cuda")]
use crate::cuda::{vacate, wait_for};

#[cfg(not(feature = "cuda"))]
fn wait_for(_: usize) -> Result<(), String> {
    Ok(())
}

#[cfg(not(feature = "cuda"))]
fn vacate(_: usize) -> Result<(), String> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::Mutex;

    const LONG: Duration = Duration::from_secs(600);

    #[test]
    fn memory_is_freed_once_all_gpus_have_come_to_rest() {
        static DONE: Mutex<Vec<(&str, usize)>> = Mutex::new(Vec::new());
        let wait: Work = |gpu| {
            thread::sleep(Duration::from_millis(30 * gpu as u64));
            DONE.lock().push(("waits", gpu));
            Ok(())
        };
        let vacate: Work = |gpu| {
            DONE.lock().push(("frees", gpu));
            Ok(())
        };
        assert_eq!(settled(&BTreeSet::from([0, 1, 2]), LONG, wait, vacate), Ok(()));
        let mut done = DONE.lock();
        done[..3].sort_unstable();
        done[3..].sort_unstable();
        let expected = [("waits", 0), ("waits", 1), ("waits", 2), ("frees", 0), ("frees", 1), ("frees", 2)];
        assert_eq!(*done, expected);
        assert_eq!(settle(&[Device::flex()], Duration::ZERO), Ok(()));
    }

    #[test]
    fn gpus_that_fail_or_do_not_end_are_named_and_keep_all_memory() {
        let wait: Work = |gpu| match gpu {
            0 => Ok(()),
            1 => Err("an illegal address".into()),
            _ => {
                thread::sleep(Duration::from_secs(3600));
                Ok(())
            }
        };
        let never: Work = |gpu| unreachable!("memory of GPU {gpu} is freed although others may still use it");
        let error = settled(&BTreeSet::from([0, 1, 2, 3]), Duration::from_secs(2), wait, never).unwrap_err();
        assert_eq!(error, "GPU 1: an illegal address; GPU 2 and GPU 3 still at work after 2 s");
    }
}
