//! Where a rank holds the value of a parameter: on its device, or as a stand-in.

use burn::tensor::{Device, GradientCheckpointingStrategy, Tensor};

use crate::local::Placements;

/// What a rank holds of a value that is another's: the shape, by one element that is not a number, so that whoever takes it
/// for the value learns of it.
pub(super) fn stand_in<const D: usize>(value: &Tensor<D>, device: Option<&Device>) -> Tensor<D> {
    let device = device.cloned().unwrap_or_else(|| value.device());
    let nothing = |device: &Device| Tensor::<D>::full([1; D], f64::NAN, (device, value.dtype()));
    let placements = Placements::of(value);
    let nothing = if placements.is_logical() {
        let share = nothing(&device.inner()).expand(placements.local_shape(value.shape()));
        as_leaf(placements.from_local(share), value.gradient_checkpointing_strategy())
    } else {
        nothing(&device).expand(value.shape())
    };
    if value.is_require_grad() { nothing.require_grad() } else { nothing }
}

/// `value` on `device`, as a leaf with the device's gradient checkpointing.
pub(super) fn moved<const D: usize>(value: Tensor<D>, device: &Device) -> Tensor<D> {
    let tracked = value.is_require_grad();
    let value = value.without_autodiff();
    if !device.is_autodiff() {
        return value.to_device(device);
    }
    let strategy = Tensor::<1>::zeros([1], device).gradient_checkpointing_strategy();
    let leaf = as_leaf(value.to_device(&device.clone().inner()), strategy);
    if tracked { leaf.require_grad() } else { leaf }
}

/// `value` on its device with autodiff.
fn as_leaf<const D: usize>(value: Tensor<D>, strategy: Option<GradientCheckpointingStrategy>) -> Tensor<D> {
    let leaf = Tensor::from_inner(value);
    match strategy {
        Some(strategy) => leaf.with_gradient_checkpointing_strategy(strategy),
        None => leaf,
    }
}
