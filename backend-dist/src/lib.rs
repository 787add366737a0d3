//! Device meshes, ranks, collectives and sharded-tensor operations with autodiff for Burn.

pub mod collective;
#[cfg(any(test, feature = "cuda"))]
mod column_major;
pub mod comm;
#[cfg(feature = "cuda")]
mod cuda;
pub mod exchange;
pub mod gpu;
pub mod launch;
pub mod memory;
pub mod mesh;
#[cfg(feature = "cuda")]
mod nccl;
pub mod ops;
pub mod shard;
