//! Parameters of a logical device, whose shards are on owners: every rank gathers and reduces its share.

use burn::backend::TensorMetadata;
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{Slice, Tensor};
use burn_group::GroupBackend;

use super::op::{Sharding, UnshardOps};
use crate::mesh_backend::local::{Known, local_of};

/// Runs `f` on the rank's share of `x`, flat, and puts the result back where the parameter is: `known`, if the device has
/// several ranks.
fn on_share(
    x: FloatTensor<GroupBackend>,
    known: Option<&Known>,
    f: impl FnOnce(FloatTensor<GroupBackend>) -> Tensor<1>,
) -> FloatTensor<GroupBackend> {
    let local = if known.is_some() { local_of(x) } else { x };
    let shape = local.shape();
    let flat = GroupBackend::float_reshape(local, [shape.num_elements()].into());
    let result = f(flat).try_into_primitive::<GroupBackend>().expect("a value stays on its device");
    let value = GroupBackend::float_reshape(result, shape);
    match known {
        Some(known) => known.global_of(value),
        None => value,
    }
}

impl UnshardOps for GroupBackend {
    fn unshard(base: FloatTensor<Self>, sharding: Sharding, backward: bool) -> FloatTensor<Self> {
        let Some(index) = sharding.index else { return base };
        on_share(base, sharding.placements.known(), |flat| {
            let held = if sharding.is_owner() { flat } else { Self::float_slice(flat, &[Slice::from(0..1)]) };
            sharding.gathers.whole(index, Tensor::from_primitive::<Self>(held), backward)
        })
    }

    fn reduce_gradient(gradient: FloatTensor<Self>, sharding: Sharding) -> FloatTensor<Self> {
        let known = sharding.placements.known();
        let gradient = if let Some(known) = known { known.moved_to(gradient) } else { gradient };
        on_share(gradient, known, |flat| sharding.gathers.reduce(sharding.index, Tensor::from_primitive::<Self>(flat)))
    }
}
