//! Logical devices on GPUs: burn-nn's encoder, unmodified, in tensor parallel against one GPU, and its speed.

use crate::choice::Choice;
use crate::clock::{self, Seconds};
use crate::encoder::{self, SEQUENCE, STEPS, Small, Training, compare, large, values};
use crate::ranks::{on_gpus, slowest, tensor_parallel};
use crate::report::Report;
use backend_dist::launch::{BoxError, Rank};
use backend_dist::logical::Placement;
use backend_dist::mesh::Axis;
use backend_dist::mesh_backend::{self, LogicalDevice, LogicalOptions, Redistribute, explain};
use backend_dist::parallelize::{Plan, parallelize};
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, FloatDType, Tensor};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// Burn's own device.
    Plain,
    /// A logical device whose parameters `Plan::auto` has placed.
    Tensor,
    /// The same with activations sharded along the sequence between the blocks.
    Sequence,
    /// `Tensor` under bf16 autocast.
    Autocast,
    /// `Sequence` under bf16 autocast.
    AutocastSequence,
}

impl Way {
    fn is_half(self) -> bool {
        matches!(self, Self::Autocast | Self::AutocastSequence)
    }
}

pub fn run(choice: &Choice, report: &mut Report) -> Result<(), BoxError> {
    let [gpus, width, layers, batch] = choice.numbers[..] else { unreachable!("four numbers") };
    if choice.does("check") {
        for dtype in [DType::F64, DType::F32] {
            check(gpus, dtype, report)?;
        }
        check_masked(gpus, report)?;
    }
    if !choice.does("time") {
        return Ok(());
    }
    println!("{:<16} {:>4} {:>12} {:>9} {:>9} {:>10}", "way", "GPUs", "tokens/s", "step, ms", "host, ms", "operations");
    let speeds = [Way::Plain, Way::Tensor, Way::Autocast].map(|way| (way, 1)).into_iter();
    let many = [Way::Tensor, Way::Autocast, Way::AutocastSequence].map(|way| (way, gpus));
    for (way, gpus) in speeds.chain(many.into_iter().filter(|(_, gpus)| *gpus > 1)) {
        let config = large(width, layers);
        let steps = on_gpus(&tensor_parallel(gpus), |rank| speed(rank, way, &config, batch))?;
        let seconds = slowest(&steps, |(step, _)| step.done);
        let (tokens, host) = ((batch * SEQUENCE) as f64 / seconds, 1e3 * slowest(&steps, |(step, _)| step.issued));
        let operations = steps[0].1.operations / STEPS;
        if way != Way::Plain {
            println!("{}", steps[0].1);
        }
        let way = format!("{way:?}");
        println!("{way:<16} {gpus:>4} {tokens:>12.0} {:>9.1} {host:>9.1} {operations:>10}", 1e3 * seconds);
    }
    Ok(())
}

fn device(rank: &Rank, way: Way) -> Device {
    let axes: &[Axis] = if rank.mesh.world_size() == 1 { &[] } else { &[Axis::Tp] };
    let device = match way {
        Way::Plain => rank.device.clone(),
        Way::Tensor | Way::Sequence => rank.logical_device(axes),
        Way::Autocast | Way::AutocastSequence => {
            let autocast = Some(FloatDType::BF16);
            rank.logical_device_with(axes, LogicalOptions { autocast, ..Default::default() })
        }
    };
    device.autodiff()
}

fn placed(rank: &Rank, way: Way, model: TransformerEncoder) -> Result<TransformerEncoder, BoxError> {
    let is_alone = way == Way::Plain || rank.mesh.world_size() == 1;
    Ok(if is_alone { model } else { parallelize(model, rank, &Plan::auto())? })
}

fn gradients(rank: &Rank, way: Way, model: &TransformerEncoder, x: Tensor<3>) -> GradientsParams {
    let is_sharded = matches!(way, Way::Sequence | Way::AutocastSequence);
    let x = if is_sharded { x.redistribute(rank, Axis::Tp, Placement::Shard(1)) } else { x };
    encoder::gradients(model, x)
}

/// Trains a small encoder three steps and compares the parameters with those of one GPU.
fn check(gpus: usize, dtype: DType, report: &mut Report) -> Result<(), BoxError> {
    let small = Small::new()?;
    let trained = |way: Way, gpus: usize| {
        on_gpus(&tensor_parallel(gpus), |rank| {
            let device = device(rank, way);
            let mut training = Training::new(placed(rank, way, small.model(&device, dtype)?)?);
            for step in 0..3 {
                let x = small.batch(4, step, &device, dtype);
                training.step(1e-3, |model| gradients(rank, way, model, x));
            }
            let explained = (way != Way::Plain && rank.rank == 0).then(|| explain(&device).to_string());
            Ok((values(&training.model()), explained))
        })
    };
    let expected = trained(Way::Plain, 1)?.remove(0).0;
    let mut ways = vec![(Way::Tensor, 1)];
    if gpus > 1 {
        ways.extend([(Way::Tensor, gpus), (Way::Sequence, gpus)]);
    }
    if dtype == DType::F32 {
        ways.push((Way::Autocast, 1));
        ways.extend((gpus > 1).then_some((Way::AutocastSequence, gpus)));
    }
    for (way, gpus) in ways {
        for (rank, (found, explained)) in trained(way, gpus)?.into_iter().enumerate() {
            let what = format!("{way:?}, rank {rank} of {gpus}");
            compare(report, &what, if way.is_half() { DType::BF16 } else { dtype }, &found, &expected);
            if let (Some(explained), DType::F64) = (explained, dtype) {
                println!("{explained}");
            }
        }
    }
    Ok(())
}

/// The same of an encoder with dropout and padding. Burn's own device draws other numbers, so what is expected is one GPU in
/// f32, where nothing of attention is in one kernel.
fn check_masked(gpus: usize, report: &mut Report) -> Result<(), BoxError> {
    let small = Small::with_dropout()?;
    let trained = |way: Way, gpus: usize| {
        on_gpus(&tensor_parallel(gpus), |rank| {
            let device = device(rank, way);
            device.seed(3);
            let mut training = Training::new(placed(rank, way, small.model(&device, DType::F32)?)?);
            for step in 0..3 {
                let x = small.batch(4, step, &device, DType::F32);
                let input = TransformerEncoderInput::new(x.clone()).mask_pad(encoder::padding(&x));
                training.step(1e-3, |model| encoder::gradients_of(model, input));
            }
            Ok((values(&training.model()), explain(&device).to_string()))
        })
    };
    let expected = trained(Way::Tensor, 1)?.remove(0).0;
    let many = [(Way::Tensor, gpus), (Way::Autocast, gpus)].into_iter().filter(|(_, gpus)| *gpus > 1);
    for (way, gpus) in std::iter::once((Way::Autocast, 1)).chain(many) {
        for (rank, (found, explained)) in trained(way, gpus)?.into_iter().enumerate() {
            let what = format!("{way:?} with dropout and padding, rank {rank} of {gpus}");
            compare(report, &what, if way.is_half() { DType::BF16 } else { DType::F32 }, &found, &expected);
            if way.is_half() {
                report.holds(format!("{what}: attention is one kernel"), explained.contains("attention gradient"));
            }
        }
    }
    Ok(())
}

/// What a step takes, and what the logical device did in all of them.
fn speed(
    rank: &Rank,
    way: Way,
    config: &TransformerEncoderConfig,
    batch: usize,
) -> Result<(Seconds, mesh_backend::Report), BoxError> {
    let device = device(rank, way);
    let mut training = Training::new(placed(rank, way, config.init(&device))?);
    let x = Tensor::<3>::ones([batch, SEQUENCE, config.d_model], &device);
    let mut step = || training.step(1e-5, |model| gradients(rank, way, model, x.clone()));
    (0..2).for_each(|_| step());
    device.sync()?;
    let explained = || if way == Way::Plain { mesh_backend::Report::default() } else { explain(&device) };
    let before = explained();
    let seconds = clock::batch(&device, &rank.group(Axis::Tp), STEPS, step);
    Ok((seconds, explained().since(&before)))
}
