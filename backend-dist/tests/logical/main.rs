//! Tensors of a logical device equal those of one device, whatever the placements.

mod gradients;
mod layers;
mod misuse;
mod operations;
mod patterns;
mod programs;
mod property;
mod random;
mod rarer;
mod recognized;
mod teams;
mod trained;

use burn::tensor::{Device, FloatDType};
use std::sync::Once;

/// The CPU, with f64 as the default type.
fn cpu() -> Device {
    static CONFIGURED: Once = Once::new();
    let mut device = Device::flex();
    CONFIGURED.call_once(|| device.configure(FloatDType::F64).unwrap());
    device
}
