//! How fast devices sum a buffer over all of them.

use backend_dist::collective::all_reduce;
use backend_dist::comm::{ReduceOp, RunError};
use backend_dist::launch::launch;
use backend_dist::mesh::{Axis, Mesh, ParallelLayout};
use burn::tensor::{Device, Tensor};
use std::time::Instant;

/// The speed of an all-reduce.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkSpeed {
    /// Seconds of one all-reduce on the slowest rank.
    pub seconds: f64,
    /// Bytes of a rank's buffer.
    pub bytes: usize,
    /// `2 (n − 1) / n · bytes / seconds`: what crosses the slowest link in a ring, comparable between numbers of
    /// devices (`busbw` of nccl-tests).
    pub bus: f64,
}

/// Sums `elements` f32 over a rank per device, `repeats` times after two to warm up, and checks the sum. Fails if a
/// rank fails or the sum is wrong. Panics if there are fewer than two devices.
pub fn link_speed(devices: &[Device], elements: usize, repeats: usize) -> Result<LinkSpeed, RunError> {
    let ranks = devices.len();
    assert!(ranks > 1, "an all-reduce needs two devices");
    let mesh = Mesh::new(ParallelLayout { dp: ranks, ..Default::default() }).expect("data parallelism is always legal");
    let times = launch(&mesh, devices, |rank| {
        let group = rank.group(Axis::Dp);
        let x = Tensor::<1>::full([elements], (rank.rank + 1) as f32, &rank.device);
        let sum = || all_reduce(x.clone(), ReduceOp::Sum, &group);
        let (first, expected) = (sum(), (ranks * (ranks + 1) / 2) as f32);
        let found = first.clone().slice([elements - 1..elements]).into_scalar::<f32>();
        if found != expected {
            return Err(format!("an all-reduce of 1 to {ranks} gave {found} instead of {expected}").into());
        }
        drop((first, sum()));
        rank.device.sync()?;
        let start = Instant::now();
        for _ in 0..repeats {
            sum();
        }
        rank.device.sync()?;
        Ok(start.elapsed().as_secs_f64() / repeats as f64)
    })?;
    let (seconds, bytes) = (times.into_iter().fold(f64::MIN_POSITIVE, f64::max), 4 * elements);
    Ok(LinkSpeed { seconds, bytes, bus: 2.0 * (ranks - 1) as f64 / ranks as f64 * bytes as f64 / seconds })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_sum_and_are_timed() {
        let speed = link_speed(&vec![Device::flex(); 3], 1000, 2).unwrap();
        assert!(speed.seconds > 0.0 && speed.bytes == 4000, "{speed:?}");
        assert_eq!(speed.bus, 4.0 / 3.0 * 4000.0 / speed.seconds);
    }
}
