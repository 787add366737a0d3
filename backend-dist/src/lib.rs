//! Ranks, groups and collectives for Burn, and the operations of parallel layers.
//!
//! A rank is a thread that owns a device. [`launch`](launch::launch) starts one for each rank of a
//! [`Mesh`](mesh::Mesh), in one process or in [several](process); all run the same program (SPMD). The ranks of a
//! [`Group`](comm::Group) communicate by [collectives](collective), in a model by [those that have
//! gradients](ops::conjugate):
//!
//! ```
//! use backend_dist::{collective::all_reduce, comm::ReduceOp, launch::launch, mesh::{Axis, Mesh}};
//! use burn::tensor::{Device, Tensor};
//!
//! let mesh = Mesh::new("TP2 DP2".parse()?)?;
//! let sums = launch(&mesh, &[Device::flex()], |rank| {
//!     let x = Tensor::<1>::full([3], rank.rank as f32, &rank.device);
//!     Ok(all_reduce(x, ReduceOp::Sum, &rank.group(Axis::Tp)).into_data().iter::<f32>().collect::<Vec<_>>())
//! })?;
//! assert_eq!(sums, [[1.0; 3], [1.0; 3], [5.0; 3], [5.0; 3]]);
//! # Ok::<(), backend_dist::launch::BoxError>(())
//! ```

pub mod buffer;
pub mod collective;
pub mod collective_ops;
#[cfg(any(test, feature = "cuda"))]
mod column_major;
pub mod comm;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(any(test, feature = "cuda"))]
mod failed;
pub mod fully_shard;
pub mod gpu;
pub mod gradients;
pub mod host_copy;
#[cfg(feature = "cuda")]
pub mod idle;
#[cfg(any(feature = "cuda", test))]
mod in_place;
pub mod launch;
pub mod local;
#[cfg(feature = "decorator")]
pub mod logical;
pub mod memory;
pub mod mesh;
#[cfg(feature = "decorator")]
pub mod mesh_backend;
#[cfg(feature = "cuda")]
mod nccl;
mod no_fusion;
pub mod ops;
#[cfg(feature = "cuda")]
pub mod overlap;
#[cfg(feature = "decorator")]
pub mod parallelize;
pub mod process;
pub mod profile;
pub mod random;
pub mod shard;
#[cfg(any(feature = "cuda", test))]
mod size_class;
#[cfg(any(feature = "cuda", test))]
mod slot_pool;
pub mod startup;
#[cfg(feature = "cuda")]
pub mod timeline;
