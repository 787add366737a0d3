//! Copies of GPU memory to page-locked host memory: what they hold although the memory is written right after, and how
//! long they take.
//!
//! `cargo run --release --example host_copy_check --features cuda -- [GPUS] [GB]`; without numbers, 4 GB of one GPU.

use std::time::Instant;

use backend_dist::gpu;
use backend_dist::gpu::buffer::Buffer;
use backend_dist::gpu::host_copy::{HostBytes, HostMemory, held};
use backend_dist::launch::{BoxError, Rank, launch};
use backend_dist::mesh::{Mesh, ParallelLayout};
use burn::tensor::{DType, Device, Tensor, TensorData};

const BUFFERS: usize = 8;
const ROUNDS: usize = 5;
/// Elements of a ramp at the begin of each buffer.
const RAMP: usize = 1 << 20;

fn main() -> Result<(), BoxError> {
    let numbers: Vec<usize> = std::env::args().skip(1).map(|text| text.parse()).collect::<Result<_, _>>()?;
    let number = |index: usize, default| numbers.get(index).copied().unwrap_or(default);
    let (gpus, gigabytes) = (number(0, 1), number(1, 4));
    gpu::require(gpus)?;
    let devices: Vec<Device> = (0..gpus).map(Device::cuda).collect();
    let mesh = Mesh::new(ParallelLayout { dp: gpus, ..Default::default() })?;
    let wrong: usize = launch(&mesh, &devices, |rank| check(&rank, gigabytes << 30))?.into_iter().sum();
    match wrong {
        0 => Ok(()),
        _ => Err(format!("{wrong} copies are BAD").into()),
    }
}

/// How many copies of `bytes` bytes are wrong.
fn check(rank: &Rank, bytes: usize) -> Result<usize, BoxError> {
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
    let mut wrong = 0;
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
        let bad = copied.iter().enumerate().filter(|copy| !right(*copy)).count();
        wrong += bad;
        println!(
            "rank {}: issued in {:.2} ms, copied in {seconds:.3} s ({:.1} GB/s): {}",
            rank.rank,
            issued * 1e3,
            bytes as f64 / seconds / 1e9,
            if bad == 0 { "right" } else { "BAD" }
        );
    }
    Ok(wrong)
}

/// Of a buffer's elements after the ramp.
fn value(round: usize, buffer: usize) -> f32 {
    (round * BUFFERS + buffer) as f32 + 0.5
}
