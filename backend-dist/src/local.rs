//! Each rank's share of the tensors of a [logical device](crate::mesh_backend::LogicalDevice::logical_device), for programs that
//! communicate with ranks outside of it: data parallelism around tensor parallelism.
//!
//! On other devices a tensor is its own share.
//!
//! ```
//! use backend_dist::{collective::all_reduce, comm::ReduceOp, launch::launch, mesh::{Axis, Mesh}};
//! use backend_dist::{local::{Placements, to_local}, mesh_backend::{Redistribute, Teams}, logical::Placement};
//! use burn::tensor::{Device, Tensor};
//!
//! let mesh = Mesh::new("TP2 DP2".parse()?)?;
//! let teams = Teams::new(&mesh, Axis::Tp).across(Axis::Dp);
//! launch(&mesh, &[Device::flex()], |rank| {
//!     teams.run(&rank, |device| {
//!         let gradient = Tensor::<2>::ones([2, 4], &device).redistribute(&rank, Axis::Tp, Placement::Shard(1));
//!         let placements = Placements::of(&gradient);
//!         // Every rank has two columns.
//!         let local = to_local(gradient);
//!         assert_eq!(local.dims(), [2, 2]);
//!         let sum = all_reduce(local, ReduceOp::Sum, &rank.group(Axis::Dp));
//!         let sum = placements.from_local(sum);
//!         assert_eq!(sum.dims(), [2, 4]);
//!         assert!(sum.into_data().iter::<f32>().all(|value| value == 2.0));
//!         Ok(())
//!     })
//! })?;
//! # Ok::<(), backend_dist::launch::BoxError>(())
//! ```

#[cfg(feature = "decorator")]
use crate::mesh_backend::local::{Known, local_of, on_logical};
use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Shape, Tensor};

/// The rank's share of a tensor, as a tensor of which each rank has its own. On a device that is not logical, or of one
/// rank, `x`.
pub fn to_local<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    #[cfg(feature = "decorator")]
    return on_logical(x, local_of);
    #[cfg(not(feature = "decorator"))]
    x
}

/// Whether a device is [logical](crate::mesh_backend).
pub fn is_logical(device: &Device) -> bool {
    #[cfg(feature = "decorator")]
    return crate::mesh_backend::local::is_logical(device);
    #[cfg(not(feature = "decorator"))]
    false
}

/// The tensors of a logical device that a program makes from some time on, so that what it keeps of them can be made
/// whole: reading it needs no collective then, whoever reads it. Elsewhere nothing.
pub struct Recent {
    #[cfg(feature = "decorator")]
    recent: crate::mesh_backend::local::Recent,
}

impl Recent {
    /// Those that come from now on.
    #[cfg_attr(not(feature = "decorator"), allow(unused_variables, reason = "no device is logical"))]
    pub fn on(device: &Device) -> Self {
        Self {
            #[cfg(feature = "decorator")]
            recent: crate::mesh_backend::local::Recent::on(device),
        }
    }

    /// Makes those that still exist whole on every rank, but for the gradients `grads` of the module's parameters.
    #[cfg_attr(not(feature = "decorator"), allow(unused_variables, reason = "no device is logical"))]
    pub fn make_whole<M: Module>(self, module: &M, grads: &GradientsParams) {
        #[cfg(feature = "decorator")]
        self.recent.make_whole(module, grads);
    }
}

/// Where a tensor is, and where others are to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placements {
    #[cfg(feature = "decorator")]
    known: Option<Known>,
}

#[cfg(feature = "decorator")]
impl Placements {
    /// Where `x` is.
    pub fn of<const D: usize>(x: &Tensor<D>) -> Self {
        Self { known: Known::of(x) }
    }

    pub(crate) fn known(&self) -> Option<&Known> {
        self.known.as_ref()
    }

    /// Whether the tensor is on a logical device of several ranks.
    pub fn is_logical(&self) -> bool {
        self.known.is_some()
    }

    /// The shape of a rank's share of a tensor of this shape.
    pub fn local_shape(&self, shape: Shape) -> Shape {
        self.known.as_ref().map_or(shape.clone(), |known| known.local_shape(shape))
    }

    /// The tensor of the logical device in these placements of which every rank's share is its own `local`.
    pub fn from_local<const D: usize>(&self, local: Tensor<D>) -> Tensor<D> {
        match &self.known {
            Some(known) => on_logical(local, |local| known.global_of(local)),
            None => local,
        }
    }

    /// `x`, a tensor of the same device, in these placements. A collective.
    pub fn moved<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        match &self.known {
            Some(known) => on_logical(x, |x| known.moved_to(x)),
            None => x,
        }
    }

    /// `x`, a tensor of the same device, in the place of the parameter whose placements these are. A collective.
    pub fn replaced_by<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        match &self.known {
            Some(known) => on_logical(x, |x| known.replaced_by(x)),
            None => x,
        }
    }

    /// Whether a tensor there becomes one here by a sum over ranks, and by nothing else.
    pub(crate) fn is_sum_of(&self, there: &Self) -> bool {
        self.known.as_ref().zip(there.known.as_ref()).is_some_and(|(here, there)| here.is_sum_of(there))
    }
}

#[cfg(not(feature = "decorator"))]
#[allow(missing_docs, reason = "see above")]
impl Placements {
    pub fn of<const D: usize>(_: &Tensor<D>) -> Self {
        Self {}
    }

    pub fn is_logical(&self) -> bool {
        false
    }

    pub fn local_shape(&self, shape: Shape) -> Shape {
        shape
    }

    pub fn from_local<const D: usize>(&self, local: Tensor<D>) -> Tensor<D> {
        local
    }

    pub fn moved<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        x
    }

    pub fn replaced_by<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        x
    }

    pub(crate) fn is_sum_of(&self, _: &Self) -> bool {
        false
    }
}
