//! What a logical device costs an operation on the host: steps of a tiny encoder of burn-nn on CPU ranks, whose operations
//! themselves take next to no time. The time is that of the first rank's thread while it runs, so that waiting for another
//! rank is not in it; with a thread for the device, that of the program's.

use crate::choice::Choice;
use crate::encoder::{Training, gradients};
use crate::report::Report;
use backend_dist::launch::{BoxError, launch};
use backend_dist::mesh::{Axis, Mesh};
use backend_dist::mesh_backend::{LogicalDevice, LogicalOptions, explain};
use backend_dist::parallelize::{Plan, parallelize};
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig};
use burn::tensor::{Device, FloatDType, Tensor};

pub fn run(choice: &Choice, _: &mut Report) -> Result<(), BoxError> {
    let (layers, steps) = (choice.numbers[0], choice.numbers[1]);
    let plain = micros(&mut init(&Device::flex(), layers, Ok)?, &Device::flex(), steps);
    println!("{:<24} {plain:>10.0} µs a step", "Burn's device");
    let fused = LogicalOptions { fusion: Some(true), autocast: Some(FloatDType::BF16), ..Default::default() };
    let ahead = LogicalOptions { run_ahead: Some(true), ..fused };
    let ways = [
        ("logical", "TP1", LogicalOptions::default()),
        ("logical, fused", "TP1", fused),
        ("logical, fused, ahead", "TP1", ahead),
        ("logical, TP2", "TP2", LogicalOptions::default()),
        ("logical, fused, TP2", "TP2", fused),
    ];
    for (name, layout, options) in ways {
        launch(&Mesh::new(layout.parse()?)?, &[Device::flex()], |rank| {
            let device = rank.logical_device_with(&[Axis::Tp], options);
            let mut training = init(&device, layers, |model| Ok(parallelize(model, &rank, &Plan::auto())?))?;
            let micros = micros(&mut training, &device, steps);
            let before = explain(&device).operations;
            step(&mut training, &device);
            let operations = explain(&device).operations - before;
            let each = (micros - plain) / operations as f64;
            if rank.rank == 0 {
                println!("{name:<24} {micros:>10.0} µs a step, {operations} operations, {each:.2} µs more for each");
            }
            Ok(())
        })?;
    }
    Ok(())
}

fn init(
    device: &Device,
    layers: usize,
    place: impl Fn(TransformerEncoder) -> Result<TransformerEncoder, BoxError>,
) -> Result<Training, BoxError> {
    let config = TransformerEncoderConfig::new(8, 16, 2, layers).with_dropout(0.0);
    Ok(Training::new(place(config.init(&device.clone().autodiff()))?))
}

fn step(training: &mut Training, device: &Device) {
    training.step(1e-5, |model| gradients(model, Tensor::ones([1, 4, 8], &device.clone().autodiff())));
}

/// Microseconds of a step.
fn micros(training: &mut Training, device: &Device, steps: usize) -> f64 {
    (0..3).for_each(|_| step(training, device));
    let start = ran();
    (0..steps).for_each(|_| step(training, device));
    device.sync().expect("the device runs");
    (ran() - start) / steps as f64
}

/// Microseconds for which this thread has run, where the system says it (Linux's `schedstat`).
fn ran() -> f64 {
    let stat =
        std::fs::read_to_string("/proc/thread-self/schedstat").expect("a system that counts the time of threads");
    stat.split(' ').next().and_then(|text| text.parse::<f64>().ok()).expect("nanoseconds come first") * 1e-3
}
