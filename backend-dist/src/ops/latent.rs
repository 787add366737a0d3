//! Keys and values of latent attention, as one node of the graph: in separate operations the shared key is copied for
//! every head, and its gradient and those of keys and values are put together from pieces.

use burn::backend::{
    Autodiff, Backend, Dispatch, Flex, Shape, Slice, TensorMetadata,
    autodiff::{
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    backend_extension,
    tensor::FloatTensor,
};
use burn::tensor::Tensor;

use super::{
    kernels::LocalKernels,
    options::Rotation,
    outputs::{Others, other},
};

/// Keys `[s, b, heads, rotated + own]` and values `[s, b, heads, value]`. A head of `kv [s, b, heads, own + value]` is
/// `[own | value]`, and a key `[rotated | own]` with the rotated part of all heads made of `shared [s, b, rotated]`, as
/// [`rope`](super::rope) does, by the angles `cos, sin [s, rotated / 2]`, or `[s b, rotated / 2]` if samples have their
/// own. No gradient flows into these. Both results must be used.
///
/// # Panics
///
/// If the shapes do not fit.
pub fn latent_keys(kv: Tensor<4>, shared: Tensor<3>, [cos, sin]: [Tensor<2>; 2], own: usize) -> [Tensor<4>; 2] {
    let ([s, b, heads, both], of_shared, [rows, half]) = (kv.dims(), shared.dims(), cos.dims());
    assert!(0 < own && own < both, "latent_keys: {own} features of a key's own, keys and values are {:?}", kv.dims());
    assert_eq!(of_shared, [s, b, 2 * half], "latent_keys: the shared key, for angles {:?}", cos.dims());
    assert_eq!(cos.dims(), sin.dims(), "latent_keys: cos and sin differ in shape");
    assert!(rows == s || rows == s * b, "latent_keys: {rows} rows of angles for {s} positions of {b} samples");
    assert!(heads > 0, "latent_keys: no heads");
    let others = Others::default();
    let (kv, shared, cos, sin) = (kv.into_dispatch(), shared.into_dispatch(), cos.into_dispatch(), sin.into_dispatch());
    let keys = <Dispatch as LatentOps>::op_latent_keys(kv, shared, cos, sin, own, others.clone());
    let keys = Tensor::from_dispatch(keys);
    let values = other(&keys, &others, 0);
    [keys, values]
}

/// What a backend computes for [`latent_keys`]; the default bodies cut the projection into its parts.
pub trait LatentKernels: LocalKernels {
    /// Keys and values.
    fn latent_keys(
        kv: FloatTensor<Self>,
        shared: FloatTensor<Self>,
        angles: [FloatTensor<Self>; 2],
        own: usize,
    ) -> [FloatTensor<Self>; 2] {
        forward_in_parts::<Self>(kv, shared, angles, own)
    }

    /// The gradients of `kv` and `shared` from those of keys and values.
    fn latent_keys_grads(
        grads: [FloatTensor<Self>; 2],
        angles: [FloatTensor<Self>; 2],
        own: usize,
    ) -> [FloatTensor<Self>; 2] {
        grads_in_parts::<Self>(grads, angles, own)
    }
}

impl LatentKernels for Flex {}

pub fn forward_in_parts<B: LocalKernels>(
    kv: FloatTensor<B>,
    shared: FloatTensor<B>,
    angles: [FloatTensor<B>; 2],
    own: usize,
) -> [FloatTensor<B>; 2] {
    let (shape, rotated) = (kv.shape(), shared.shape()[2]);
    let [s, b, heads, both] = [shape[0], shape[1], shape[2], shape[3]];
    let turned = turned::<B>(shared, angles, Rotation::Forward);
    let turned = B::float_reshape(turned, Shape::from([s, b, 1, rotated]));
    let turned = B::float_expand(turned, Shape::from([s, b, heads, rotated]));
    let keys = B::float_cat(vec![turned, features::<B>(kv.clone(), 0..own)], 3);
    [keys, features::<B>(kv, own..both)]
}

pub fn grads_in_parts<B: LocalKernels>(
    [keys, values]: [FloatTensor<B>; 2],
    angles: [FloatTensor<B>; 2],
    own: usize,
) -> [FloatTensor<B>; 2] {
    let shape = keys.shape();
    let [s, b, length] = [shape[0], shape[1], shape[3]];
    let rotated = length - own;
    let shared = B::sum_dim(features::<B>(keys.clone(), 0..rotated), 2);
    let shared = B::float_reshape(shared, Shape::from([s, b, rotated]));
    let kv = B::float_cat(vec![features::<B>(keys, rotated..length), values], 3);
    [kv, turned::<B>(shared, angles, Rotation::Back)]
}

/// `x [s, b, rotated]`, rotated.
fn turned<B: LocalKernels>(x: FloatTensor<B>, [cos, sin]: [FloatTensor<B>; 2], rotation: Rotation) -> FloatTensor<B> {
    let (shape, rows) = (x.shape(), cos.shape()[0]);
    let heads = B::float_reshape(x, Shape::from([rows, shape[0] * shape[1] / rows, 1, shape[2]]));
    B::float_reshape(B::rope_apply(heads, cos, sin, 1, rotation), shape)
}

fn features<B: Backend>(x: FloatTensor<B>, range: std::ops::Range<usize>) -> FloatTensor<B> {
    B::float_slice(x, &[Slice::full(), Slice::full(), Slice::full(), Slice::from(range)])
}

#[backend_extension(Flex, Cube: cfg(feature = "cuda"), Autodiff)]
pub(super) trait LatentOps: Backend {
    /// Keys; the values are the only one of the `others`.
    fn op_latent_keys(
        kv: FloatTensor<Self>,
        shared: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        own: usize,
        others: Others,
    ) -> FloatTensor<Self>;
}

macro_rules! latent_ops {
    ($backend:ty) => {
        impl LatentOps for $backend {
            fn op_latent_keys(
                kv: FloatTensor<Self>,
                shared: FloatTensor<Self>,
                cos: FloatTensor<Self>,
                sin: FloatTensor<Self>,
                own: usize,
                others: Others,
            ) -> FloatTensor<Self> {
                let [keys, values] = Self::latent_keys(kv, shared, [cos, sin], own);
                others.put::<Self>([values]);
                keys
            }
        }
    };
}

latent_ops!(Flex);
#[cfg(feature = "cuda")]
latent_ops!(burn::backend::Cube);

/// Parents: keys and values as they come, the shared key.
#[derive(Debug)]
struct Keys;

#[derive(Clone, Debug)]
struct Kept<B: Backend> {
    angles: [FloatTensor<B>; 2],
    own: usize,
    others: Others,
}

impl<B: LatentKernels> Backward<B, 2> for Keys {
    type State = Kept<B>;

    fn backward(self, ops: Ops<Kept<B>, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let (keys, Kept { angles, own, others }) = (grads.consume::<B>(&ops.node), ops.state);
        let values = others.gradients::<B>().remove(0);
        for (node, grad) in ops.parents.into_iter().zip(B::latent_keys_grads([keys, values], angles, own)) {
            if let Some(node) = node {
                grads.register::<B>(node.id, grad);
            }
        }
    }
}

impl<B: LatentKernels, C: CheckpointStrategy> LatentOps for Autodiff<B, C> {
    fn op_latent_keys(
        kv: FloatTensor<Self>,
        shared: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        own: usize,
        others: Others,
    ) -> FloatTensor<Self> {
        let ((kv, kv_node), (shared, shared_node)) = (kv.into_parts(), shared.into_parts());
        let angles = [cos.into_primitive(), sin.into_primitive()];
        let [keys, values] = B::latent_keys(kv, shared, angles.clone(), own);
        others.put::<B>([values]);
        match Keys.prepare::<C>([kv_node, shared_node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(Kept { angles, own, others }, keys),
            OpsKind::UnTracked(prep) => prep.finish(keys),
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device, Distribution};

    use super::*;
    use crate::ops::{expand_dim, rope};

    /// Values and gradients are those of the parts, bit for bit; angles of places and of each sample's.
    #[test]
    fn keys_and_values_are_those_of_their_parts() {
        let device = Device::flex().autodiff();
        let [s, b, heads, rotated, own, value] = [3, 2, 5, 4, 3, 6];
        for (dtype, rows) in [(DType::F64, s), (DType::F64, s * b), (DType::F32, s), (DType::BF16, s * b)] {
            let on = (&device, dtype);
            let random = |shape: [usize; 4]| Tensor::<4>::random(shape, Distribution::Default, on);
            let kv = random([s, b, heads, own + value]).require_grad();
            let shared: Tensor<3> = random([1, s, b, rotated]).reshape([s, b, rotated]).require_grad();
            let [cos, sin] = [(); 2].map(|()| random([1, 1, rows, rotated / 2]).reshape([rows, rotated / 2]));
            let slopes = [random([s, b, heads, rotated + own]), random([s, b, heads, value])];

            let turned = rope(shared.clone().reshape([rows, s * b / rows, 1, rotated]), cos.clone(), sin.clone());
            let turned = expand_dim(turned.reshape([s, b, 1, rotated]), 2, heads);
            let apart = [Tensor::cat(vec![turned, kv.clone().narrow(3, 0, own)], 3), kv.clone().narrow(3, own, value)];
            let whole = latent_keys(kv.clone(), shared.clone(), [cos, sin], own);
            for (found, expected) in whole.iter().zip(&apart) {
                found.to_data().assert_eq(&expected.to_data(), true);
            }
            let [found, expected] = [whole, apart].map(|[keys, values]| {
                ((keys * slopes[0].clone()).sum() + (values * slopes[1].clone()).sum()).backward()
            });
            let gradient = |from| kv.grad(from).expect("it takes part").into_data();
            gradient(&found).assert_eq(&gradient(&expected), true);
            let gradient = |from| shared.grad(from).expect("it takes part").into_data();
            gradient(&found).assert_eq(&gradient(&expected), true);
        }
    }
}
