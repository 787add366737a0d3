//! Device meshes, ranks, collectives and sharded-tensor operations with autodiff for Burn.

pub mod buffer;
pub mod cache;
pub mod collective;
#[cfg(any(test, feature = "cuda"))]
mod column_major;
pub mod comm;
#[cfg(feature = "cuda")]
mod cuda;
pub mod exchange;
#[cfg(any(test, feature = "cuda"))]
mod failed;
pub mod gpu;
#[cfg(feature = "cuda")]
pub mod idle;
#[cfg(any(feature = "cuda", test))]
mod in_place;
pub mod launch;
pub mod memory;
pub mod mesh;
#[cfg(feature = "cuda")]
mod nccl;
pub mod ops;
#[cfg(feature = "cuda")]
pub mod overlap;
pub mod process;
pub mod profile;
pub mod random;
#[cfg(any(feature = "cuda", test))]
mod room;
pub mod shard;
#[cfg(any(feature = "cuda", test))]
mod slots;
pub mod startup;
#[cfg(feature = "cuda")]
pub mod timeline;
