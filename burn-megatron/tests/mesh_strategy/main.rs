//! `MegatronStrategy::mesh` under `SupervisedTraining` against one device with the larger batch, in double precision.

#[macro_use]
#[path = "../support/says.rs"]
mod says;

#[path = "../support/panics.rs"]
mod panics;
#[path = "../support/values.rs"]
mod values;

mod batch_norm;
mod classifier;
mod clip_grad_norm;
mod clipping;
mod columns;
mod overlap;
mod passes;
mod processes;
mod runs;
mod setup;
mod stages;
mod stages_norm;
mod training;
mod wrong;

use burn::tensor::{Device, FloatDType};
use std::sync::Once;

/// The CPU, with f64 as the default type: masks and losses are of the default type.
fn cpu() -> Device {
    static CONFIGURED: Once = Once::new();
    let mut device = Device::flex();
    CONFIGURED.call_once(|| device.configure(FloatDType::F64).unwrap());
    device
}
