//! What a logical device costs an operation on the host: steps of a tiny encoder of burn-nn on one CPU rank, whose
//! operations themselves take next to no time.
//!
//! `cargo run --release --example logical_overhead -- [LAYERS] [STEPS]`

use backend_dist::launch::{BoxError, launch};
use backend_dist::mesh::Mesh;
use backend_dist::mesh_backend::{LogicalDevice, LogicalOptions, explain};
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, FloatDType, Tensor};
use std::time::Instant;

fn main() -> Result<(), BoxError> {
    let numbers: Vec<usize> = std::env::args().skip(1).map(|text| text.parse()).collect::<Result<_, _>>()?;
    let number = |index: usize, default| numbers.get(index).copied().unwrap_or(default);
    let (layers, steps) = (number(0, 12), number(1, 20));
    let plain = micros(&Device::flex(), layers, steps);
    println!("{:<24} {plain:>10.0} µs a step", "Burn's device");
    let fused = LogicalOptions { fusion: Some(true), autocast: Some(FloatDType::BF16), ..Default::default() };
    let ahead = LogicalOptions { run_ahead: Some(true), ..fused };
    let ways = [("logical", LogicalOptions::default()), ("logical, fused", fused), ("logical, fused, ahead", ahead)];
    for (name, options) in ways {
        launch(&Mesh::new("TP1".parse()?)?, &[Device::flex()], |rank| {
            let device = rank.logical_device_with(&[], options);
            let micros = micros(&device, layers, steps);
            let before = explain(&device).operations;
            step(&mut init(&device, layers), &device);
            let operations = explain(&device).operations - before;
            let each = (micros - plain) / operations as f64;
            println!("{name:<24} {micros:>10.0} µs a step, {operations} operations, {each:.2} µs more for each");
            Ok(())
        })?;
    }
    Ok(())
}

struct Training {
    model: Option<TransformerEncoder>,
    optimizer: burn::optim::ModuleOptimizer,
}

fn init(device: &Device, layers: usize) -> Training {
    let config = TransformerEncoderConfig::new(8, 16, 2, layers).with_dropout(0.0);
    Training { model: Some(config.init(&device.clone().autodiff())), optimizer: AdamWConfig::new().init() }
}

fn step(training: &mut Training, device: &Device) {
    let x = Tensor::<3>::ones([1, 4, 8], &device.clone().autodiff());
    let model = training.model.take().expect("a model");
    let loss = model.forward(TransformerEncoderInput::new(x)).powi_scalar(2).mean();
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    training.model = Some(training.optimizer.step(1e-5, model, grads));
}

/// Microseconds of a step.
fn micros(device: &Device, layers: usize, steps: usize) -> f64 {
    let mut training = init(device, layers);
    (0..3).for_each(|_| step(&mut training, device));
    let start = Instant::now();
    (0..steps).for_each(|_| step(&mut training, device));
    device.sync().expect("the device runs");
    start.elapsed().as_secs_f64() * 1e6 / steps as f64
}
