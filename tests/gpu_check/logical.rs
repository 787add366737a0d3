//! Logical devices on GPUs: burn-nn's encoder, unmodified, in tensor parallel against one GPU, and its speed.
//!
//! `cargo run --release --example logical_check --features cuda -- [GPUS] [WIDTH] [LAYERS] [BATCH]`; without the last
//! three 1024, 24 and 16: an encoder of 302 million parameters and a batch of 16 × 512 tokens, in f32.

mod encoder;

use backend_dist::gpu;
use backend_dist::launch::{BoxError, Rank, launch};
use backend_dist::logical::Placement;
use backend_dist::mesh::{Axis, Mesh, ParallelLayout};
use backend_dist::mesh_backend::{LogicalDevice, LogicalOptions, Redistribute, Report, explain};
use backend_dist::parallelize::{Plan, parallelize};
use burn::module::Module;
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::store::ModuleRecord;
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use encoder::{To, Values, differs};
use std::time::Instant;

const SEQUENCE: usize = 512;
const STEPS: usize = 5;

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

fn main() -> Result<(), BoxError> {
    let numbers: Vec<usize> = std::env::args().skip(1).map(|text| text.parse()).collect::<Result<_, _>>()?;
    let number = |index: usize, default| numbers.get(index).copied().unwrap_or(default);
    let (gpus, width, layers, batch) = (number(0, 2), number(1, 1024), number(2, 24), number(3, 16));
    gpu::require(gpus)?;
    let mut bad = 0;
    for dtype in [DType::F64, DType::F32] {
        bad += check(gpus, dtype)?;
    }
    println!("{:<16} {:>4} {:>12} {:>9} {:>9} {:>10}", "way", "GPUs", "tokens/s", "step, ms", "host, ms", "operations");
    let speeds = [Way::Plain, Way::Tensor, Way::Autocast].map(|way| (way, 1)).into_iter();
    let many = [Way::Tensor, Way::Autocast, Way::AutocastSequence].map(|way| (way, gpus));
    for (way, gpus) in speeds.chain(many.into_iter().filter(|(_, gpus)| *gpus > 1)) {
        let config = TransformerEncoderConfig::new(width, 4 * width, 16, layers).with_dropout(0.0);
        let steps = ranks(gpus, |rank| speed(rank, way, &config, batch))?;
        let most = |of: fn(&Step) -> f64| steps.iter().map(of).fold(0.0, f64::max);
        let tokens = (batch * SEQUENCE) as f64 / most(|step| step.seconds);
        let host = 1e3 * most(|step| step.host);
        let operations = steps[0].operations;
        if way != Way::Plain {
            println!("{}", steps[0].report);
        }
        let way = format!("{way:?}");
        println!(
            "{way:<16} {gpus:>4} {tokens:>12.0} {:>9.1} {host:>9.1} {operations:>10}",
            1e3 * most(|step| step.seconds)
        );
    }
    if bad > 0 {
        return Err(format!("{bad} results are wrong").into());
    }
    Ok(())
}

fn ranks<T: Send>(gpus: usize, f: impl Fn(&Rank) -> Result<T, BoxError> + Sync) -> Result<Vec<T>, BoxError> {
    let devices: Vec<Device> = (0..gpus).map(Device::cuda).collect();
    Ok(launch(&Mesh::new(ParallelLayout { tp: gpus, ..Default::default() })?, &devices, |rank| f(&rank))?)
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
    let x = if matches!(way, Way::Sequence | Way::AutocastSequence) {
        x.redistribute(rank, Axis::Tp, Placement::Shard(1))
    } else {
        x
    };
    let loss = model.forward(TransformerEncoderInput::new(x)).powi_scalar(2).mean();
    GradientsParams::from_grads(loss.backward(), model)
}

/// Trains a small encoder three steps and compares the parameters with those of one GPU.
fn check(gpus: usize, dtype: DType) -> Result<usize, BoxError> {
    let config = TransformerEncoderConfig::new(64, 128, 4, 3).with_dropout(0.0);
    let record = config.init(&Device::flex()).into_record().into_bytes()?;
    let trained = |way: Way, gpus: usize| {
        ranks(gpus, |rank| {
            let device = device(rank, way);
            let record = ModuleRecord::from_bytes(record.clone())?;
            let model = config.init(&device).load_record(record).map(&mut To(dtype));
            let mut model = placed(rank, way, model)?;
            let mut optimizer = AdamWConfig::new().init();
            for step in 0..3 {
                let values: Vec<f64> = (0..4 * 8 * 64).map(|i| ((i * 37 + step) as f64).sin()).collect();
                let x = Tensor::<3>::from_data(TensorData::new(values, [4, 8, 64]), (&device, dtype));
                let grads = gradients(rank, way, &model, x);
                model = optimizer.step(1e-3, model, grads);
            }
            let mut values = Values(Vec::new());
            model.visit(&mut values);
            let report = (way != Way::Plain && rank.rank == 0).then(|| explain(&device).to_string());
            Ok((values.0, report))
        })
    };
    let expected = trained(Way::Plain, 1)?.remove(0).0;
    let mut bad = 0;
    let mut ways = vec![(Way::Tensor, 1)];
    if gpus > 1 {
        ways.extend([(Way::Tensor, gpus), (Way::Sequence, gpus)]);
    }
    if dtype == DType::F32 {
        ways.extend([(Way::Autocast, 1), (Way::AutocastSequence, gpus)]);
        ways.retain(|(way, gpus)| *way != Way::AutocastSequence || *gpus > 1);
    }
    for (way, gpus) in ways {
        for (rank, (found, report)) in trained(way, gpus)?.into_iter().enumerate() {
            let what = format!("{way:?}, rank {rank} of {gpus}");
            let is_half = matches!(way, Way::Autocast | Way::AutocastSequence);
            bad += usize::from(differs(&what, if is_half { DType::BF16 } else { dtype }, &found, &expected));
            if let (Some(report), DType::F64) = (report, dtype) {
                println!("{report}");
            }
        }
    }
    Ok(bad)
}

/// What a step takes.
struct Step {
    seconds: f64,
    /// Until the host has issued everything.
    host: f64,
    operations: usize,
    /// Of all steps.
    report: Report,
}

fn speed(rank: &Rank, way: Way, config: &TransformerEncoderConfig, batch: usize) -> Result<Step, BoxError> {
    let device = device(rank, way);
    let mut model = placed(rank, way, config.init(&device))?;
    let mut optimizer = AdamWConfig::new().init();
    let x = Tensor::<3>::ones([batch, SEQUENCE, config.d_model], &device);
    let (mut start, mut before) = (Instant::now(), Report::default());
    let warm = 2;
    for step in 0..warm + STEPS {
        if step == warm {
            device.sync().map_err(|error| error.to_string())?;
            if way != Way::Plain {
                before = explain(&device);
            }
            start = Instant::now();
        }
        let grads = gradients(rank, way, &model, x.clone());
        model = optimizer.step(1e-5, model, grads);
    }
    let host = start.elapsed().as_secs_f64() / STEPS as f64;
    device.sync().map_err(|error| error.to_string())?;
    let seconds = start.elapsed().as_secs_f64() / STEPS as f64;
    let report = if way == Way::Plain { before } else { explain(&device).since(&before) };
    Ok(Step { seconds, host, operations: report.operations / STEPS, report })
}
