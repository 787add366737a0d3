//! Parameters of a logical device, whose shards are on owners: every rank gathers and reduces its share.

use burn::backend::{TensorMetadata, ops::FloatTensorOps, tensor::FloatTensor};
use burn::tensor::{Shape, Tensor};
use burn_group::GroupBackend;

use super::op::{Sharding, UnshardOps, held};
use crate::mesh_backend::local::{Known, local_of};

type Logical = FloatTensor<GroupBackend>;

/// What this rank has of `x`, which is `known` if the device has several ranks.
fn share(x: Logical, known: Option<&Known>) -> Logical {
    if known.is_some() { local_of(x) } else { x }
}

/// A flat share in its shape, where the parameter is.
fn placed(flat: Tensor<1>, shape: Shape, known: Option<&Known>) -> Logical {
    let flat = flat.try_into_primitive::<GroupBackend>().expect("a value stays on its device");
    let value = GroupBackend::float_reshape(flat, shape);
    match known {
        Some(known) => known.global_of(value),
        None => value,
    }
}

impl UnshardOps for GroupBackend {
    fn unshard(base: FloatTensor<Self>, sharding: Sharding, backward: bool) -> FloatTensor<Self> {
        let Some(index) = sharding.index else { return base };
        let known = sharding.placements.known();
        let share = share(base, known);
        let shape = share.shape();
        let held = || Tensor::from_primitive::<Self>(held::<Self>(share, sharding.is_owner()));
        placed(sharding.gathers.whole(index, held, backward), shape, known)
    }

    fn reduce_gradient(gradient: FloatTensor<Self>, sharding: Sharding) -> Option<FloatTensor<Self>> {
        let known = sharding.placements.known();
        let gradient = if let Some(known) = known { known.moved_to(gradient) } else { gradient };
        let share = share(gradient, known);
        let shape = share.shape();
        let flat = Tensor::from_primitive::<Self>(held::<Self>(share, true));
        Some(placed(sharding.gathers.reduce(sharding.index, &sharding.path, flat)?, shape, known))
    }
}
