//! Places the parameters of any Burn module on a [logical device](crate::mesh_backend::LogicalDevice::logical_device): tensor
//! parallelism of a model whose source knows nothing of it.
//!
//! ```
//! use backend_dist::{launch::launch, mesh::{Axis, Mesh}, mesh_backend::LogicalDevice};
//! use burn::nn::transformer::{TransformerEncoderConfig, TransformerEncoderInput};
//! use burn::tensor::{Device, Tensor};
//! use backend_dist::parallelize::{Plan, parallelize};
//!
//! launch(&Mesh::new("TP2".parse()?)?, &[Device::flex()], |rank| {
//!     let device = rank.logical_device(&[Axis::Tp]).autodiff();
//!     let model = TransformerEncoderConfig::new(8, 16, 2, 1).init(&device);
//!     let model = parallelize(model, &rank, &Plan::auto())?;
//!     let x = Tensor::<3>::ones([2, 4, 8], &device);
//!     let gradients = model.forward(TransformerEncoderInput::new(x)).sum().backward();
//!     let query = model.layers[0].mha.query.weight.val();
//!     assert_eq!(query.grad(&gradients).unwrap().dims(), [8, 8]);
//!     Ok(())
//! })?;
//! # Ok::<(), backend_dist::launch::BoxError>(())
//! ```

mod attributes;
mod error;
mod parameters;
mod pattern;
mod place;
mod plan;
#[cfg(test)]
mod tests;

pub use error::PlanError;
pub use plan::{Plan, Style};

use crate::logical::Placement;
use burn::module::{Module, ModuleDisplay};
use burn::tensor::Device;
use parameters::{Parameter, parameters};
use place::Placer;
use ranks::launch::Rank;
use std::collections::HashMap;

/// The module with its parameters placed as `plan` says. They must be on a logical device of `rank` that has the plan's
/// axis. All ranks of the axis must call this alike, with the same values.
///
/// # Errors
/// A pattern that no parameter matches, and a size that the ranks do not divide: see [`PlanError`]. Nothing has been
/// moved then.
pub fn parallelize<M: Module + ModuleDisplay>(module: M, rank: &Rank, plan: &Plan) -> Result<M, PlanError> {
    let placements = placements(&module, plan, rank.mesh.axis_size(plan.axis()))?;
    Ok(module.map(&mut Placer::new(rank, plan.axis(), placements)))
}

/// [`parallelize`] of a module on another device: its parameters move to the logical device `device`, and each of those
/// that the plan shards is placed before the next one moves.
pub fn parallelize_on<M: Module + ModuleDisplay>(
    module: M,
    device: &Device,
    rank: &Rank,
    plan: &Plan,
) -> Result<M, PlanError> {
    let placements = placements(&module, plan, rank.mesh.axis_size(plan.axis()))?;
    Ok(module.map(&mut Placer::new(rank, plan.axis(), placements).on(device)).fork(device))
}

/// [`parallelize_on`] of a pipeline stage: `part` is `whole` with stand-ins for the parameters of other stages. The plan is
/// that of the whole module; only parameters whose path `is_here` are sharded.
pub fn parallelize_part<M: Module + ModuleDisplay>(
    (whole, part): (&M, M),
    device: &Device,
    rank: &Rank,
    plan: &Plan,
    is_here: impl Fn(&str) -> bool,
) -> Result<M, PlanError> {
    let mut placements = placements(whole, plan, rank.mesh.axis_size(plan.axis()))?;
    placements.retain(|path, _| is_here(path));
    Ok(part.map(&mut Placer::new(rank, plan.axis(), placements).on(device)).fork(device))
}

/// Whether `plan` fits `module` on `ranks` ranks. Several must have something that it shards, and with `sequence`
/// something that sequence parallelism can begin with: an embedding, or a matrix by rows.
///
/// # Errors
/// As [`parallelize`], and [`PlanError::Nothing`] or [`PlanError::Sequence`].
pub fn check<M: Module + ModuleDisplay>(
    module: &M,
    plan: &Plan,
    ranks: usize,
    sequence: bool,
) -> Result<(), PlanError> {
    let (placements, axis) = (placements(module, plan, ranks)?, plan.axis());
    if ranks == 1 {
        return Ok(());
    }
    if placements.is_empty() {
        return Err(PlanError::Nothing { ranks, axis });
    }
    let parameters = parameters(module);
    let begins_sequence = |parameter: &Parameter| match placements.get(&parameter.path()) {
        Some(Placement::Shard(0)) => parameter.shape.len() == 2,
        Some(_) => parameter.above(0).is_some_and(|field| field.container == "Embedding"),
        None => false,
    };
    match !sequence || parameters.iter().any(begins_sequence) {
        true => Ok(()),
        false => Err(PlanError::Sequence { ranks, axis }),
    }
}

fn placements<M: Module + ModuleDisplay>(
    module: &M,
    plan: &Plan,
    ranks: usize,
) -> Result<HashMap<String, Placement>, PlanError> {
    let heads = attributes::attributes(module, &["n_heads", "n_heads_kv"]);
    plan.placements(&parameters(module), &heads, ranks)
}
