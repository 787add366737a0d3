//! Where the tensors of a model are on the mesh, and what each operation does to that. No tensors and no threads.
//!
//! A *logical* tensor has the shape that a program on one device sees. Along every axis of the mesh it has a
//! [`Placement`]. A [rule](rules) says for one operation and one axis where the inputs must be so that every rank can
//! run the operation on what it holds, and where the outputs are then. [`plan()`] applies the rules axis by axis and
//! rewrites the operation to the shapes that one rank holds.

mod by_tensor;
mod localize;
mod parts;
mod placement;
mod plan;
pub mod rules;
#[cfg(test)]
mod tests;

pub use parts::Parts;
pub use placement::{ParsePlacementError, Placement};
#[cfg(feature = "decorator")]
pub(crate) use plan::makes_weights;
pub use plan::{Homes, OpPlan, TensorState, plan};
pub use rules::MeshAxis;
