//! Parameters of a logical device, whose shards are on owners: every rank gathers and reduces its share.

use burn::backend::TensorMetadata;
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{Slice, Tensor};
use burn_group::GroupBackend;

use super::op::{Sharding, UnshardOps};
use crate::mesh_backend::local::{Known, local_of};

/// The placements of the parameter.
fn known(sharding: &Sharding) -> &Known {
    sharding.placements.known().expect("a parameter stays on its device")
}

/// Runs `f` on the rank's share of `x`, flat, and puts the result back where the parameter is.
fn on_share(
    x: FloatTensor<GroupBackend>,
    known: &Known,
    f: impl FnOnce(FloatTensor<GroupBackend>) -> Tensor<1>,
) -> FloatTensor<GroupBackend> {
    let local = local_of(x);
    let shape = local.shape();
    let flat = GroupBackend::float_reshape(local, [shape.num_elements()].into());
    let result = f(flat).try_into_primitive::<GroupBackend>().expect("a value stays on its device");
    known.global_of(GroupBackend::float_reshape(result, shape))
}

impl UnshardOps for GroupBackend {
    fn unshard(base: FloatTensor<Self>, sharding: Sharding, backward: bool) -> FloatTensor<Self> {
        let Some(index) = sharding.index else { return base };
        on_share(base, known(&sharding), |flat| {
            let held = if sharding.is_owner() { flat } else { Self::float_slice(flat, &[Slice::from(0..1)]) };
            sharding.gathers.whole(index, Tensor::from_primitive::<Self>(held), backward)
        })
    }

    fn reduce_gradient(gradient: FloatTensor<Self>, sharding: Sharding) -> FloatTensor<Self> {
        let known = known(&sharding);
        on_share(known.moved_to(gradient), known, |flat| {
            sharding.gathers.reduce(sharding.index, Tensor::from_primitive::<Self>(flat))
        })
    }
}
