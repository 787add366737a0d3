//! A distributed backend for Burn: what its tensors are on every rank, and the modules that it distributes.
//!
//! [Ranks](launch), their [mesh] and [collectives](collective) are from the crate `ranks`, operations of parallel layers
//! with autodiff from the crate [`ops`], GPUs and their memory from the crate [`gpu`]; all are here under their names, so
//! that a program needs this crate alone.
//!
//! - [`mesh_backend`]: tensors of the shapes of one device that live on the ranks of a mesh (feature `decorator`, on by
//!   default), by the rules of [`logical`]; [`parallelize`] places the parameters of a module.
//! - [`fused_adamw`]: Burn's AdamW in fewer operations there.
//! - [`fully_shard`]: ZeRO 3 for any module. [`gradients`]: data parallelism for any module.
//! - [`paths`]: the parameters of a module by path. [`shard`]: which slice of which global tensor a local parameter holds. [`random`]: its initial values.

pub use gpu;
pub use ops;
pub use ranks::{
    buffer_collectives, collective, collective_ops, comm, launch, matrix_owners, memory, mesh, process, startup,
};
#[cfg(feature = "cuda")]
pub use ranks::{overlap, timeline};

pub mod fully_shard;
#[cfg(feature = "decorator")]
pub mod fused_adamw;
pub mod gradients;
pub mod local;
#[cfg(feature = "decorator")]
pub mod logical;
#[cfg(feature = "decorator")]
pub mod mesh_backend;
#[cfg(feature = "decorator")]
pub mod parallelize;
pub mod paths;
mod pending;
pub mod random;
pub mod shard;
mod step_order;
