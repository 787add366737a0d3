//! Ranks, groups and collectives for Burn.
//!
//! A rank is a thread that owns a device. [`launch`](launch::launch) starts one for each rank of a
//! [`Mesh`](mesh::Mesh), in one process or in [several](process); all run the same program (SPMD). The ranks of a
//! [`Group`](comm::Group) communicate by [collectives](collective):
//!
//! ```
//! use burn::tensor::{Device, Tensor};
//! use ranks::{collective::all_reduce, comm::ReduceOp, launch::launch, mesh::{Axis, Mesh}};
//!
//! let mesh = Mesh::new("TP2 DP2".parse()?)?;
//! let sums = launch(&mesh, &[Device::flex()], |rank| {
//!     let x = Tensor::<1>::full([3], rank.rank as f32, &rank.device);
//!     Ok(all_reduce(x, ReduceOp::Sum, &rank.group(Axis::Tp)).into_data().iter::<f32>().collect::<Vec<_>>())
//! })?;
//! assert_eq!(sums, [[1.0; 3], [1.0; 3], [5.0; 3], [5.0; 3]]);
//! # Ok::<(), ranks::launch::BoxError>(())
//! ```
//!
//! Modules that the documentation leaves out are for the operations and the backend of this project.

pub use layouts::{matrix_owners, mesh};

pub mod attached;
pub mod buffer_collectives;
pub mod collective;
pub mod collective_ops;
pub mod comm;
#[cfg(any(feature = "cuda", test))]
mod in_place;
pub mod launch;
pub mod memory;
#[cfg(feature = "cuda")]
#[doc(hidden)]
pub mod nccl;
#[cfg(any(test, feature = "cuda"))]
mod one_shot;
#[cfg(feature = "cuda")]
pub mod overlap;
pub mod process;
mod rank;
#[cfg(any(feature = "cuda", test))]
mod slot_pool;
pub mod startup;
#[cfg(feature = "cuda")]
pub mod timeline;
