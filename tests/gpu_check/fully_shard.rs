//! `fully_shard` on GPUs: an encoder of burn-nn trained by several ranks against one, and its speed and memory.

use crate::choice::Choice;
use crate::clock;
use crate::encoder::{self, SEQUENCE, STEPS, Small, Training, compare, large, values};
use crate::numbers::most;
use crate::ranks::{data_parallel, on_gpus, slowest};
use crate::report::Report;
use backend_dist::fully_shard::{FullyShard, Units};
use backend_dist::gpu;
use backend_dist::launch::{BoxError, Rank};
use backend_dist::mesh::Axis;
use burn::module::Module;
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor};

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

pub fn run(choice: &Choice, report: &mut Report) -> Result<(), BoxError> {
    let [gpus, width, layers, batch] = choice.numbers[..] else { unreachable!("four numbers") };
    if choice.does("check") {
        for dtype in [DType::F64, DType::F32] {
            check(gpus, dtype, report)?;
        }
    }
    if choice.does("time") {
        println!("{:<8} {:>4} {:>12} {:>14}", "way", "GPUs", "tokens/s", "GiB at most");
        for (way, gpus) in [(Way::One, 1), (Way::Whole, gpus), (Way::Sharded, gpus), (Way::Ahead, gpus)] {
            let config = large(width, layers);
            let runs = on_gpus(&data_parallel(gpus), |rank| Ok(speed(rank, way, &config, batch)))?;
            let tokens = (gpus * batch * SEQUENCE) as f64 / slowest(&runs, |run| run.0);
            let gib = most(runs.iter().map(|run| run.1 as f64)) / f64::from(1 << 30);
            println!("{:<8} {gpus:>4} {tokens:>12.0} {gib:>14.2}", format!("{way:?}"));
        }
    }
    Ok(())
}

fn autodiff(rank: &Rank) -> Device {
    rank.device.clone().autodiff().gradient_checkpointing()
}

/// Trains a small encoder three steps on every way and compares the parameters with those of one GPU.
fn check(gpus: usize, dtype: DType, report: &mut Report) -> Result<(), BoxError> {
    let small = Small::new()?;
    let trained = |way: Way, size: usize| {
        on_gpus(&data_parallel(size), |rank| {
            let device = autodiff(rank);
            let (shards, mut training) = sharded(rank, way, small.model(&device, dtype)?);
            for step in 0..3 {
                let own = 4 * gpus / size;
                let x = small.batch(4 * gpus, step, &device, dtype).narrow(0, rank.rank * own, own);
                training.step(1e-3, |model| gradients(&shards, way, model, x));
            }
            Ok(values(&training.model().materialize()))
        })
    };
    let expected = trained(Way::One, 1)?.remove(0);
    for way in [Way::Whole, Way::Sharded, Way::Ahead] {
        for (rank, found) in trained(way, gpus)?.iter().enumerate() {
            compare(report, &format!("{way:?}, rank {rank}"), dtype, found, &expected);
        }
    }
    Ok(())
}

fn sharded(rank: &Rank, way: Way, model: TransformerEncoder) -> (FullyShard, Training) {
    let keep = if way == Way::Whole { usize::MAX } else { 2048 };
    let shards = FullyShard::new(&model, &rank.group(Axis::Dp), &Units::auto().keep_below(keep));
    let model = if way == Way::One { model } else { shards.shard(model) };
    (shards, Training::new(model))
}

fn gradients(shards: &FullyShard, way: Way, model: &TransformerEncoder, x: Tensor<3>) -> GradientsParams {
    if way == Way::Ahead {
        shards.begin_pass(model);
    }
    let grads = encoder::gradients(model, x);
    if way == Way::Ahead { shards.end_pass(model, grads) } else { grads }
}

/// Seconds of a step, and the bytes of the GPU in use at the end of one.
fn speed(rank: &Rank, way: Way, config: &TransformerEncoderConfig, batch: usize) -> (f64, u64) {
    gpu::release_memory(&rank.device);
    let device = autodiff(rank);
    let (shards, mut training) = sharded(rank, way, config.init(&device));
    let x = Tensor::<3>::ones([batch, SEQUENCE, config.d_model], &device);
    let mut step = || training.step(1e-5, |model| gradients(&shards, way, model, x.clone()));
    (0..2).for_each(|_| step());
    let seconds = clock::batch(&rank.device, &rank.group(Axis::Dp), STEPS, step).done;
    (seconds, gpu::memory_use(&rank.device).map_or(0, |memory| memory.pool.most_used))
}
