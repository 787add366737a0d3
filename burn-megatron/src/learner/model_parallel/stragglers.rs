//! Ranks that work longer than the others, which wait for them (Megatron's `--log-straggler`).

use std::fmt;
use std::time::{Duration, Instant};

use backend_dist::comm::Group;
use backend_dist::launch::Rank;
#[cfg(feature = "cuda")]
use backend_dist::timeline::Timeline;
use burn::tensor::Device;

/// Steps that are looked at together.
const STEPS: u32 = 10;
/// A straggler works so many times as long as the median of the ranks.
const FACTOR: f64 = 1.5;

/// How long this rank has worked in the last steps.
pub(super) struct StragglerWatch {
    steps: u32,
    since: Instant,
    waited: Duration,
    #[cfg(feature = "cuda")]
    gpu: Option<Timeline>,
}

/// A rank that works longer than the others.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Straggler {
    rank: usize,
    /// Of the time, in which it worked instead of waiting for others.
    share: f64,
    /// The same of the median of the ranks.
    median: f64,
}

impl StragglerWatch {
    /// Also of the rank's GPU, if it has one; a trace watches it already.
    pub fn new(rank: &Rank, #[cfg_attr(not(feature = "cuda"), expect(unused))] is_traced: bool) -> Self {
        let since = Instant::now();
        Self {
            steps: 0,
            since,
            waited: rank.waited(),
            #[cfg(feature = "cuda")]
            gpu: (!is_traced).then(|| Timeline::start(&rank.device, since)).flatten(),
        }
    }

    /// Seconds in which this rank has waited for others since the last call: its host, or its GPU's compute stream for
    /// collectives. A slow GPU does not keep its own host from waiting for it, but the GPUs of others.
    fn waited(&mut self, rank: &Rank) -> f64 {
        let before = std::mem::replace(&mut self.waited, rank.waited());
        let host = (self.waited - before).as_secs_f64();
        #[cfg(feature = "cuda")]
        if let Some(gpu) = &mut self.gpu {
            let nanoseconds: u64 = gpu.read().stalls.iter().map(|[start, end]| end.saturating_sub(*start)).sum();
            // They may wait at the same time.
            return host.max(nanoseconds as f64 / 1e9);
        }
        host
    }

    /// Notes the end of a step. After every tenth, the line that names stragglers, if there are any, on all ranks; all
    /// ranks call it.
    pub fn step(&mut self, rank: &Rank, world: &Group) -> Option<String> {
        self.steps += 1;
        if self.steps < STEPS {
            return None;
        }
        let waited = self.waited(rank);
        let share = 1.0 - waited / self.since.elapsed().as_secs_f64();
        let shares = world.all_gather_host(share.clamp(0.0, 1.0));
        (self.steps, self.since, self.waited) = (0, Instant::now(), rank.waited());
        let lines: Vec<String> = stragglers(&shares).iter().map(Straggler::to_string).collect();
        (!lines.is_empty()).then(|| format!("straggler in the last {STEPS} steps: {}", lines.join("; ")))
    }
}

/// Makes a rank slow: its GPU does not begin the next step for so long, while its host continues, and a CPU rank sleeps. Returns
/// how much longer the next step takes.
pub(super) fn slow_down(
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables))] device: &Device,
    time: Duration,
) -> Duration {
    #[cfg(feature = "cuda")]
    if !time.is_zero() && backend_dist::gpu::occupy::occupy(device, time) {
        return time;
    }
    std::thread::sleep(time);
    Duration::ZERO
}

/// Ranks whose share of work is far above the median, the slowest first.
fn stragglers(shares: &[f64]) -> Vec<Straggler> {
    let mut sorted = shares.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(&median) = sorted.get(shares.len().saturating_sub(1) / 2) else { return Vec::new() };
    let all = shares.iter().enumerate().map(|(rank, &share)| Straggler { rank, share, median });
    let mut slow: Vec<Straggler> = all.filter(|straggler| straggler.share > FACTOR * median).collect();
    slow.sort_by(|a, b| b.share.total_cmp(&a.share));
    slow
}

/// `rank 3 works 92 % of the time, the median of the ranks 41 %`
impl fmt::Display for Straggler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, share, median } = self;
        write!(
            f,
            "rank {rank} works {:.0} % of the time, the median of the ranks {:.0} %",
            100.0 * share,
            100.0 * median
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_far_above_the_median_are_named_the_slowest_first() {
        let slow = stragglers(&[0.4, 0.9, 0.42, 0.95, 0.41, 0.5]);
        assert_eq!(slow.iter().map(|straggler| straggler.rank).collect::<Vec<_>>(), [3, 1]);
        assert_eq!(slow[0].to_string(), "rank 3 works 95 % of the time, the median of the ranks 42 %");
        assert_eq!(stragglers(&[0.9, 0.4])[0].rank, 0, "of two ranks the faster one is the median");
        assert_eq!((stragglers(&[0.9, 0.8, 0.85]), stragglers(&[1.0]), stragglers(&[])), (vec![], vec![], vec![]));
    }
}
