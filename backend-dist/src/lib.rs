//! Device meshes, ranks, collectives and sharded-tensor operations with autodiff for Burn.

pub mod buffer;
pub mod collective;
pub mod comm;
#[cfg(feature = "cuda")]
mod cuda;
pub mod exchange;
pub mod launch;
pub mod memory;
pub mod mesh;
#[cfg(feature = "cuda")]
mod nccl;
pub mod ops;
#[cfg(feature = "cuda")]
pub mod overlap;
pub mod shard;
