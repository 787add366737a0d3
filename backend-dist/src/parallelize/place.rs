//! Moves the parameters of a module.

use super::parameters::{Field, field, join};
use crate::logical::Placement;
use crate::mesh_backend::Redistribute;
use burn::module::{ModuleMapper, Param};
use burn::tensor::{Device, Tensor};
use ranks::launch::Rank;
use ranks::mesh::Axis;
use std::collections::HashMap;

pub(super) struct Placer<'a> {
    rank: &'a Rank,
    axis: Axis,
    placements: HashMap<String, Placement>,
    fields: Vec<Field>,
    device: Option<Device>,
}

impl<'a> Placer<'a> {
    /// By path; parameters that are not in the map stay where they are.
    pub fn new(rank: &'a Rank, axis: Axis, placements: HashMap<String, Placement>) -> Self {
        Self { rank, axis, placements, fields: Vec::new(), device: None }
    }

    /// Moves all parameters to this device, as leaves with its gradient checkpointing.
    pub fn on(mut self, device: &Device) -> Self {
        self.device = Some(device.clone());
        self
    }
}

impl ModuleMapper for Placer<'_> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.fields.push(field(name, container));
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.fields.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let to = self.placements.get(&join(&self.fields)).copied();
        match (&self.device, to) {
            (None, None) => param,
            (None, Some(to)) => param.map(|value| {
                let is_tracked = value.is_require_grad();
                // A leaf on the same device: one with gradient checkpointing is another to Burn.
                let placed = value.detach().redistribute_parameter(self.rank, self.axis, to);
                placed.detach().set_require_grad(is_tracked)
            }),
            (Some(device), to) => param.map(|value| {
                let (is_tracked, is_autodiff) = (value.is_require_grad(), value.device().is_autodiff());
                let moved = value.without_autodiff().to_device(&device.clone().inner());
                let placed = match to {
                    Some(to) => moved.redistribute_parameter(self.rank, self.axis, to),
                    None => moved,
                };
                if !is_autodiff {
                    return placed;
                }
                let leaf = Tensor::from_inner(placed);
                let leaf = match device.gradient_checkpointing_strategy() {
                    Some(strategy) => leaf.with_gradient_checkpointing_strategy(strategy),
                    None => leaf,
                };
                leaf.set_require_grad(is_tracked)
            }),
        }
    }
}
