//! Parameters of a logical device, whose shards are on owners: every rank gathers and reduces its share.

use burn::backend::TensorMetadata;
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::tensor::Tensor;
use burn_group::GroupBackend;

use super::op::{Sharding, UnshardOps, held};
use crate::mesh_backend::local::{Known, local_of};

/// Runs `f` on the rank's share of `x`, and puts the flat result back where the parameter is: `known`, if the device has
/// several ranks.
fn on_share(
    x: FloatTensor<GroupBackend>,
    known: Option<&Known>,
    f: impl FnOnce(FloatTensor<GroupBackend>) -> Tensor<1>,
) -> FloatTensor<GroupBackend> {
    let local = if known.is_some() { local_of(x) } else { x };
    let shape = local.shape();
    let result = f(local).try_into_primitive::<GroupBackend>().expect("a value stays on its device");
    let value = GroupBackend::float_reshape(result, shape);
    match known {
        Some(known) => known.global_of(value),
        None => value,
    }
}

impl UnshardOps for GroupBackend {
    fn unshard(base: FloatTensor<Self>, sharding: Sharding, backward: bool) -> FloatTensor<Self> {
        let Some(index) = sharding.index else { return base };
        on_share(base, sharding.placements.known(), |share| {
            let held = || Tensor::from_primitive::<Self>(held::<Self>(share, sharding.is_owner()));
            sharding.gathers.whole(index, held, backward)
        })
    }

    fn reduce_gradient(gradient: FloatTensor<Self>, sharding: Sharding) -> FloatTensor<Self> {
        let known = sharding.placements.known();
        let gradient = if let Some(known) = known { known.moved_to(gradient) } else { gradient };
        on_share(gradient, known, |share| {
            let flat = Tensor::from_primitive::<Self>(held::<Self>(share, true));
            sharding.gathers.reduce(sharding.index, flat)
        })
    }
}
