//! The backend that distributes any Burn model: a device whose tensors have the shapes of one device and live on the
//! ranks of a mesh.
//!
//! [`LogicalDevice::logical_device`] makes the device. Burn sends every operation on its
//! tensors here as [`OperationIr`](burn_ir::OperationIr). The [plan](crate::logical::plan()) of the operation says how
//! its inputs must be placed; they are moved there by [collectives](ranks::collective), and the rank runs the operation
//! on its shards, on its own device. Autodiff is around all of this and does not know.
//!
//! ```
//! use backend_dist::{launch::launch, mesh::{Axis, Mesh}, mesh_backend::{LogicalDevice, Redistribute, explain}};
//! use backend_dist::logical::Placement::{Partial, Replicate, Shard};
//! use burn::tensor::{Device, Tensor};
//!
//! launch(&Mesh::new("TP2".parse()?)?, &[Device::flex()], |rank| {
//!     let device = rank.logical_device(&[Axis::Tp]);
//!     // Every rank makes the same tensors, in the shapes of one device.
//!     let x = Tensor::<2>::ones([3, 4], &device);
//!     let columns = Tensor::<2>::ones([4, 6], &device).redistribute(&rank, Axis::Tp, Shard(1));
//!     let rows = Tensor::<2>::ones([6, 4], &device).redistribute(&rank, Axis::Tp, Shard(0));
//!     let hidden = x.matmul(columns);
//!     assert_eq!((hidden.dims(), hidden.placement(Axis::Tp)), ([3, 6], Shard(1)));
//!     let out = hidden.matmul(rows);
//!     assert_eq!(out.placement(Axis::Tp), Partial);
//!     assert!(out.into_data().iter::<f32>().all(|value| value == 24.0));
//!     assert_eq!(explain(&device).times("all-reduce"), 1);
//!     Ok(())
//! })?;
//! # Ok::<(), backend_dist::launch::BoxError>(())
//! ```

mod across;
pub(crate) mod async_collectives;
mod channel;
mod command;
mod device;
mod executor;
mod follow;
pub(crate) mod formula;
mod ids;
mod inner;
mod interpreter;
mod live;
pub(crate) mod local;
mod meta;
mod options;
mod parts;
mod random;
mod redistribute;
mod report;
mod reshard;
mod slot;
mod table;
mod team;
mod worker;

pub use device::{LogicalDevice, MetaDevice, explain};
pub use meta::Counts;
pub use options::LogicalOptions;
pub use redistribute::Redistribute;
pub use report::{Count, Report};
pub use slot::MeshDevice;
pub use team::Teams;
