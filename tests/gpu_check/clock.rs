//! How long calls take.

use backend_dist::comm::Group;
use backend_dist::launch::Rank;
use burn::tensor::Device;
use cubecl::prelude::Client;
use std::time::Instant;

/// Batches, whose median counts.
const BATCHES: usize = 5;
/// Seconds of a batch of calls of a kernel.
const SECONDS: f64 = 0.03;

/// Seconds of a call of kernels; it is given its number in its batch.
pub fn kernel(client: &Client, mut call: impl FnMut(usize)) -> f64 {
    let sync = || cubecl::future::block_on(client.sync()).expect("the kernels ran");
    let mut batch = |calls: usize| {
        sync();
        let start = Instant::now();
        (0..calls).for_each(&mut call);
        sync();
        start.elapsed().as_secs_f64() / calls as f64
    };
    // The first compiles.
    batch(1);
    let calls = (SECONDS / batch(2)).clamp(1.0, 1000.0) as usize;
    median([0; BATCHES].map(|_| batch(calls)))
}

/// `123.4 ms, 567.8 TFLOP/s`.
pub fn speed(flops: f64, seconds: f64) -> String {
    format!("{:8.3} ms {:6.1} TFLOP/s", seconds * 1e3, flops / seconds / 1e12)
}

/// Seconds of a call on a rank.
#[derive(Clone, Copy)]
pub struct Seconds {
    /// Until the host has issued it.
    pub issued: f64,
    /// Until the device is done.
    pub done: f64,
}

/// Medians of batches of calls that the ranks of `group` begin together, after one call.
pub fn on_rank(rank: &Rank, group: &Group, calls: usize, mut call: impl FnMut()) -> Seconds {
    call();
    let batches = [0; BATCHES].map(|_| batch(&rank.device, group, calls, &mut call));
    Seconds { issued: median(batches.map(|batch| batch.issued)), done: median(batches.map(|batch| batch.done)) }
}

/// Seconds of a call in one batch.
pub fn batch(device: &Device, group: &Group, calls: usize, mut call: impl FnMut()) -> Seconds {
    device.sync().expect("the device works");
    group.barrier();
    let start = Instant::now();
    (0..calls).for_each(|_| call());
    let issued = start.elapsed().as_secs_f64() / calls as f64;
    device.sync().expect("the device works");
    Seconds { issued, done: start.elapsed().as_secs_f64() / calls as f64 }
}

fn median(mut seconds: [f64; BATCHES]) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[BATCHES / 2]
}
