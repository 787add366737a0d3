//! `fully_shard` on GPUs: an encoder of burn-nn trained by several ranks against one, and its speed and memory.
//!
//! `cargo run --release --example fully_shard_check --features cuda -- [GPUS] [WIDTH] [LAYERS] [BATCH]`; without the last
//! three 1024, 24 and 16: an encoder of 302 million parameters with batches of 16 × 512 tokens for each GPU, in f32.

mod encoder;

use backend_dist::fully_shard::{FullyShard, Units};
use backend_dist::gpu;
use backend_dist::launch::{BoxError, Rank, launch};
use backend_dist::mesh::{Axis, Mesh, ParallelLayout};
use burn::module::Module;
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{DType, Device, Tensor, TensorData};
use encoder::{To, Values, differs};
use std::time::Instant;

const SEQUENCE: usize = 512;
const STEPS: usize = 5;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// No sharding and one rank.
    One,
    /// Every parameter whole on every rank.
    Whole,
    /// Values gathered when they are used.
    Sharded,
    /// Values gathered ahead of their use.
    Ahead,
}

fn main() -> Result<(), BoxError> {
    let numbers: Vec<usize> = std::env::args().skip(1).map(|text| text.parse()).collect::<Result<_, _>>()?;
    let number = |index: usize, default| numbers.get(index).copied().unwrap_or(default);
    let (gpus, width, layers, batch) = (number(0, 2), number(1, 1024), number(2, 24), number(3, 16));
    gpu::require(gpus)?;
    let mut bad = 0;
    for dtype in [DType::F64, DType::F32] {
        bad += check(gpus, dtype)?;
    }
    println!("{:<8} {:>4} {:>12} {:>14}", "way", "GPUs", "tokens/s", "GiB at most");
    for (way, gpus) in [(Way::One, 1), (Way::Whole, gpus), (Way::Sharded, gpus), (Way::Ahead, gpus)] {
        let config = TransformerEncoderConfig::new(width, 4 * width, 16, layers).with_dropout(0.0);
        let runs = ranks(gpus, |rank| Ok(speed(rank, way, &config, batch)))?;
        let seconds = runs.iter().map(|run| run.0).fold(0.0, f64::max);
        let most = runs.iter().map(|run| run.1).max().unwrap_or(0);
        let tokens = (gpus * batch * SEQUENCE) as f64 / seconds;
        println!("{:<8} {gpus:>4} {tokens:>12.0} {:>14.2}", format!("{way:?}"), most as f64 / f64::from(1 << 30));
    }
    if bad > 0 {
        return Err(format!("{bad} results are wrong").into());
    }
    Ok(())
}

fn ranks<T: Send>(gpus: usize, f: impl Fn(&Rank) -> Result<T, BoxError> + Sync) -> Result<Vec<T>, BoxError> {
    let devices: Vec<Device> = (0..gpus).map(Device::cuda).collect();
    Ok(launch(&Mesh::new(ParallelLayout { dp: gpus, ..Default::default() })?, &devices, |rank| f(&rank))?)
}

fn autodiff(rank: &Rank) -> Device {
    rank.device.clone().autodiff().gradient_checkpointing()
}

/// Trains a small encoder three steps on every way and compares the parameters with those of one GPU.
fn check(gpus: usize, dtype: DType) -> Result<usize, BoxError> {
    let config = TransformerEncoderConfig::new(64, 128, 4, 3).with_dropout(0.0);
    let record = config.init(&Device::flex()).into_record().into_bytes()?;
    let trained = |way: Way, size: usize| {
        ranks(size, |rank| {
            let device = autodiff(rank);
            let record = burn::store::ModuleRecord::from_bytes(record.clone())?;
            let model = config.init(&device).load_record(record).map(&mut To(dtype));
            let batch = |step: usize| {
                let values: Vec<f64> = (0..4 * gpus * 8 * 64).map(|i| ((i * 37 + step) as f64).sin()).collect();
                let x = Tensor::<3>::from_data(TensorData::new(values, [4 * gpus, 8, 64]), (&device, dtype));
                let own = 4 * gpus / size;
                x.narrow(0, rank.rank * own, own)
            };
            Ok(train(rank, way, model, 3, batch))
        })
    };
    let expected = trained(Way::One, 1)?.remove(0);
    let mut bad = 0;
    for way in [Way::Whole, Way::Sharded, Way::Ahead] {
        for (rank, found) in trained(way, gpus)?.into_iter().enumerate() {
            bad += usize::from(differs(&format!("{way:?}, rank {rank}"), dtype, &found, &expected));
        }
    }
    Ok(bad)
}

/// The values of all parameters after `steps` steps, whole.
fn train(
    rank: &Rank,
    way: Way,
    model: TransformerEncoder,
    steps: usize,
    batch: impl Fn(usize) -> Tensor<3>,
) -> Vec<f64> {
    let (shards, mut model) = sharded(rank, way, model);
    let mut optimizer = AdamWConfig::new().init();
    for step in 0..steps {
        let grads = gradients(&shards, way, &model, batch(step));
        model = optimizer.step(1e-3, model, grads);
    }
    let mut values = Values(Vec::new());
    model.materialize().visit(&mut values);
    values.0
}

fn sharded(rank: &Rank, way: Way, model: TransformerEncoder) -> (FullyShard, TransformerEncoder) {
    let keep = if way == Way::Whole { usize::MAX } else { 2048 };
    let shards = FullyShard::new(&model, &rank.group(Axis::Dp), &Units::auto().keep_below(keep));
    let model = if way == Way::One { model } else { shards.shard(model) };
    (shards, model)
}

fn gradients(shards: &FullyShard, way: Way, model: &TransformerEncoder, x: Tensor<3>) -> GradientsParams {
    if way == Way::Ahead {
        shards.begin_pass(model);
    }
    let loss = model.forward(TransformerEncoderInput::new(x)).powi_scalar(2).mean();
    let grads = GradientsParams::from_grads(loss.backward(), model);
    if way == Way::Ahead { shards.end_pass(model, grads) } else { grads }
}

/// Seconds of a step, and the bytes of the GPU in use at the end of one.
fn speed(rank: &Rank, way: Way, config: &TransformerEncoderConfig, batch: usize) -> (f64, u64) {
    gpu::release_memory(&rank.device);
    let device = autodiff(rank);
    let (shards, mut model) = sharded(rank, way, config.init(&device));
    let mut optimizer = AdamWConfig::new().init();
    let x = Tensor::<3>::ones([batch, SEQUENCE, config.d_model], &device);
    let mut start = Instant::now();
    let warm = 2;
    for step in 0..warm + STEPS {
        if step == warm {
            rank.device.sync().expect("the GPU works");
            start = Instant::now();
        }
        let grads = gradients(&shards, way, &model, x.clone());
        model = optimizer.step(1e-5, model, grads);
    }
    rank.device.sync().expect("the GPU works");
    let seconds = start.elapsed().as_secs_f64() / STEPS as f64;
    let most = gpu::memory_use(&rank.device).map_or(0, |memory| memory.pool.most_used);
    (seconds, most)
}
