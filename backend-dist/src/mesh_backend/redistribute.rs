//! Where a tensor of a logical device is, and moving it.

use super::command::{self, Command};
use super::live::{Live, live};
use crate::logical::Placement;
use burn::tensor::{Device, Int, Tensor};
use ranks::launch::Rank;
use ranks::mesh::Axis;

/// Tensors of a [logical device](super::LogicalDevice::logical_device) along the axes of the mesh.
///
/// ```
/// use backend_dist::{launch::launch, logical::Placement, mesh::{Axis, Mesh}, mesh_backend::{LogicalDevice, Redistribute}};
/// use burn::tensor::Tensor;
///
/// launch(&Mesh::new("TP2".parse()?)?, &[burn::tensor::Device::flex()], |rank| {
///     let x = Tensor::<2>::ones([4, 6], &rank.logical_device(&[Axis::Tp]));
///     let halves = x.redistribute(&rank, Axis::Tp, Placement::Shard(1));
///     // Every rank holds three columns, and the program sees six.
///     assert_eq!((halves.placement(Axis::Tp), halves.dims()), (Placement::Shard(1), [4, 6]));
///     Ok(())
/// })?;
/// # Ok::<(), backend_dist::launch::BoxError>(())
/// ```
pub trait Redistribute: Sized {
    /// The same tensor in another placement along `axis`. All ranks must call this alike; where it is a collective, it
    /// is in the order of the program's others. A tracked tensor stays in its graph, and its gradient comes as it is.
    ///
    /// # Panics
    /// If the tensor is on no logical device of `rank` with this axis, has no such dimension, or the number of ranks
    /// does not divide it; and for [`Placement::Partial`], which only operations make.
    fn redistribute(self, rank: &Rank, axis: Axis, to: Placement) -> Self;

    /// Where the tensor is along `axis`.
    ///
    /// # Panics
    /// If the tensor is on no logical device with this axis.
    fn placement(&self, axis: Axis) -> Placement;

    /// [`redistribute`](Self::redistribute) of a parameter: along tensor-parallel axes activations move to it, and
    /// along data-parallel axes it moves to them.
    fn redistribute_parameter(self, rank: &Rank, axis: Axis, to: Placement) -> Self;
}

macro_rules! redistribute {
    ($kind:ty, $detached:ident) => {
        impl<const D: usize> Redistribute for Tensor<D, $kind> {
            fn redistribute(self, _: &Rank, axis: Axis, to: Placement) -> Self {
                let axis = checked(&self.device(), &self.dims(), axis, to);
                command::send(Command::Move { axis, to, weight: false }, || self.mul_scalar(1)).0
            }

            fn placement(&self, axis: Axis) -> Placement {
                let (live, axis) = axis_of(&self.device(), axis);
                let (_, name) = command::send(Command::Name, || $detached(self).mul_scalar(1));
                live.client.state(name).at[axis]
            }

            fn redistribute_parameter(self, _: &Rank, axis: Axis, to: Placement) -> Self {
                let axis = checked(&self.device(), &self.dims(), axis, to);
                command::send(Command::Move { axis, to, weight: true }, || self.mul_scalar(1)).0
            }
        }
    };
}

redistribute!(burn::tensor::Float, detached);
redistribute!(Int, same);

fn detached<const D: usize>(x: &Tensor<D>) -> Tensor<D> {
    x.clone().without_autodiff()
}

fn same<const D: usize>(x: &Tensor<D, Int>) -> Tensor<D, Int> {
    x.clone()
}

/// The logical device, and the index of `axis` on it.
fn axis_of(device: &Device, axis: Axis) -> (Live, usize) {
    let live = live(device).unwrap_or_else(|| {
        panic!("axis {axis}: a tensor on {device:?} is on no logical device: see `Rank::logical_device`")
    });
    let index = live.axes.iter().position(|&other| other == axis);
    let index = index.unwrap_or_else(|| {
        let axes: Vec<_> = live.axes.iter().map(|axis| axis.name()).collect();
        panic!("axis {axis}: the tensor's logical device has the axes {axes:?}")
    });
    (live, index)
}

/// The index of `axis`, if the tensor can be moved there.
fn checked(device: &Device, shape: &[usize], axis: Axis, to: Placement) -> usize {
    let (live, index) = axis_of(device, axis);
    let ranks = live.ranks[index];
    match to {
        Placement::Partial | Placement::Varying => {
            panic!("axis {axis}: {to} is what operations make; ask for Replicate or Shard")
        }
        _ if to.dim().is_some_and(|dim| dim >= shape.len()) => {
            panic!("axis {axis}: {to} of a tensor of shape {shape:?}; the last dimension is {}", shape.len() - 1)
        }
        Placement::Shard(dim) if to.local_shape(shape, ranks).is_none() => {
            let size = shape[dim];
            let (below, above) = ((size / ranks).max(1) * ranks, (size / ranks + 1) * ranks);
            panic!(
                "axis {axis}: Shard({dim}) of a tensor of shape {shape:?}: {ranks} ranks do not divide {size}; the \
                 nearest sizes are {below} and {above}"
            )
        }
        _ if to.is_in_parts() && to.local_shape(shape, ranks).is_none() => {
            panic!("axis {axis}: {to} of a tensor of shape {shape:?}: {ranks} ranks do not divide every part")
        }
        _ => index,
    }
}
