//! Places the parameters of any Burn module on a [logical device](crate::launch::Rank::logical_device): tensor
//! parallelism of a model whose source knows nothing of it.
//!
//! ```
//! use backend_dist::{launch::launch, mesh::{Axis, Mesh}};
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

use crate::launch::Rank;
use burn::module::{Module, ModuleDisplay};
use parameters::parameters;
use place::Placer;

/// The module with its parameters placed as `plan` says. They must be on a logical device of `rank` that has the plan's
/// axis. All ranks of the axis must call this alike, with the same values.
///
/// # Errors
/// A pattern that no parameter matches, and a size that the ranks do not divide: see [`PlanError`]. Nothing has been
/// moved then.
pub fn parallelize<M: Module + ModuleDisplay>(module: M, rank: &Rank, plan: &Plan) -> Result<M, PlanError> {
    let ranks = rank.mesh.axis_size(plan.axis());
    let parameters = parameters(&module);
    let heads = attributes::attributes(&module, &["n_heads", "n_heads_kv"]);
    let placements = plan.placements(&parameters, &heads, ranks)?;
    Ok(module.map(&mut Placer::new(rank, plan.axis(), placements)))
}
