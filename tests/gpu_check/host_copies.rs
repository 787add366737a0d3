//! Copies of GPU memory to page-locked host memory: what they hold although the memory is written right after, and how
//! long they take.

use crate::choice::Choice;
use crate::ranks::{data_parallel, on_gpus};
use crate::report::Report;
use backend_dist::gpu;
use backend_dist::gpu::buffer::Buffer;
use backend_dist::gpu::host_copy::{HostBytes, HostMemory, held};
use backend_dist::launch::{BoxError, Rank};
use burn::tensor::{DType, Tensor, TensorData};
use std::time::Instant;

const BUFFERS: usize = 8;
const ROUNDS: usize = 5;
/// Elements of a ramp at the begin of each buffer.
const RAMP: usize = 1 << 20;

pub fn run(choice: &Choice, report: &mut Report) -> Result<(), BoxError> {
    let (gpus, gigabytes) = (choice.numbers[0], choice.numbers[1]);
    let rounds = on_gpus(&data_parallel(gpus), |rank| check(rank, gigabytes << 30))?;
    rounds.iter().flatten().for_each(|(what, is_right)| report.holds(what, *is_right));
    Ok(())
}

/// What each round took, and whether its copies of `bytes` bytes are right.
fn check(rank: &Rank, bytes: usize) -> Result<Vec<(String, bool)>, BoxError> {
    let (device, len) = (&rank.device, (bytes / BUFFERS / 4).max(RAMP));
    let buffer = || Buffer::zeros(len, device, DType::F32).ok_or("there are no buffers on this device");
    let buffers: Vec<Buffer> = (0..BUFFERS).map(|_| buffer()).collect::<Result<_, _>>()?;
    let ramp: Vec<f32> = (0..RAMP).map(|index| index as f32).collect();
    let fill = |round: usize| {
        for (index, buffer) in buffers.iter().enumerate() {
            buffer.put(0, Tensor::full([len], value(round, index), (device, DType::F32)));
            buffer.put(0, Tensor::from_data(TensorData::new(ramp.clone(), [RAMP]), (device, DType::F32)));
        }
    };
    let begin = Instant::now();
    let gpu = gpu::index(device).ok_or("the rank is on no GPU")?;
    let memory = HostMemory::new(gpu, BUFFERS * held(len * 4))?;
    println!("rank {}: {:.1} GB page-locked in {:.2} s", rank.rank, bytes as f64 / 1e9, begin.elapsed().as_secs_f64());
    let mut rounds = Vec::new();
    for round in 0..ROUNDS {
        fill(round);
        device.sync()?;
        let begin = Instant::now();
        let mut copy = memory.begin().ok_or("the memory is still held")?;
        let copied: Vec<HostBytes> =
            buffers.iter().map(|buffer| copy.add(buffer).ok_or("no room")).collect::<Result<_, _>>()?;
        copy.end();
        assert!(memory.begin().is_none(), "one copy at a time");
        // The next step: work that does not write, and then what does.
        let issued = begin.elapsed();
        memory.protect();
        fill(round + 1);
        copied.iter().try_for_each(HostBytes::wait)?;
        let (seconds, issued) = (begin.elapsed().as_secs_f64(), issued.as_secs_f64());
        device.sync()?;
        let right = |(index, bytes): (usize, &HostBytes)| {
            let values: &[f32] = bytemuck::cast_slice(bytes.bytes());
            values[..RAMP] == ramp && values[RAMP..].iter().all(|found| *found == value(round, index))
        };
        let rate = bytes as f64 / seconds / 1e9;
        let issued = issued * 1e3;
        let what = format!("rank {}: issued in {issued:.2} ms, copied in {seconds:.3} s ({rate:.1} GB/s)", rank.rank);
        rounds.push((what, copied.iter().enumerate().all(right)));
    }
    Ok(rounds)
}

/// Of a buffer's elements after the ramp.
fn value(round: usize, buffer: usize) -> f32 {
    (round * BUFFERS + buffer) as f32 + 0.5
}
