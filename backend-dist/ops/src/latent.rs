//! Keys and values of multi-head latent attention, as one autograd node. Separate operations would copy the shared key
//! for every head, and concatenate its gradient and those of keys and values.

use burn::backend::{Backend, Flex, Shape, Slice, TensorMetadata, tensor::FloatTensor as Float};
use burn::tensor::Tensor;

use super::{
    kernels::LocalKernels,
    operation::{Tensors, apply_with, operation},
    options::Rotation,
    secondary_outputs::{SecondaryOutputs, secondary_output},
};

/// Keys `[s, b, heads, rope + nope]` and values `[s, b, heads, value]`. A head of `kv [s, b, heads, nope + value]` is
/// `[nope | value]`, a key is `[rope | nope]`. The `rope` features are the same in all heads: `shared [s, b, rope]`,
/// rotated as in [`rope`](super::rope) by the angles `cos, sin [s, rope / 2]`, or `[s b, rope / 2]` if each sample has
/// its own. No gradient flows into the angles. Both results must be used.
///
/// # Panics
///
/// If the shapes do not fit.
pub fn latent_keys(kv: Tensor<4>, shared: Tensor<3>, [cos, sin]: [Tensor<2>; 2], nope: usize) -> [Tensor<4>; 2] {
    let ([s, b, heads, both], of_shared, [rows, half]) = (kv.dims(), shared.dims(), cos.dims());
    assert!(
        0 < nope && nope < both,
        "latent_keys: {nope} unrotated features of a key, keys and values are {:?}",
        kv.dims()
    );
    assert_eq!(of_shared, [s, b, 2 * half], "latent_keys: the shared key, for angles {:?}", cos.dims());
    assert_eq!(cos.dims(), sin.dims(), "latent_keys: cos and sin differ in shape");
    assert!(rows == s || rows == s * b, "latent_keys: {rows} rows of angles for {s} positions of {b} samples");
    assert!(heads > 0, "latent_keys: no heads");
    let secondary = SecondaryOutputs::new(1);
    let angles = Tensors::floats([cos, sin].map(Tensor::into_dispatch));
    let operation = Keys { nope, secondary: secondary.clone() };
    let keys = apply_with(operation, [kv.into_dispatch(), shared.into_dispatch()], angles);
    let values = secondary_output(&keys, &secondary, 0);
    [keys, values]
}

/// The kernels of [`latent_keys`]; the default bodies slice the projection.
pub trait LatentKernels: LocalKernels {
    /// Keys and values.
    fn latent_keys(kv: Float<Self>, shared: Float<Self>, angles: [Float<Self>; 2], nope: usize) -> [Float<Self>; 2] {
        forward_unfused::<Self>(kv, shared, angles, nope)
    }

    /// The gradients of `kv` and `shared` from those of keys and values.
    fn latent_keys_grads(grads: [Float<Self>; 2], angles: [Float<Self>; 2], nope: usize) -> [Float<Self>; 2] {
        grads_unfused::<Self>(grads, angles, nope)
    }
}

impl LatentKernels for Flex {}

pub fn forward_unfused<B: LocalKernels>(
    kv: Float<B>,
    shared: Float<B>,
    angles: [Float<B>; 2],
    nope: usize,
) -> [Float<B>; 2] {
    let (shape, rotated) = (kv.shape(), shared.shape()[2]);
    let [s, b, heads, both] = [shape[0], shape[1], shape[2], shape[3]];
    let rotated_key = rotated_key::<B>(shared, angles, Rotation::Forward);
    let rotated_key = B::float_reshape(rotated_key, Shape::from([s, b, 1, rotated]));
    let rotated_key = B::float_expand(rotated_key, Shape::from([s, b, heads, rotated]));
    let keys = B::float_cat(vec![rotated_key, features::<B>(kv.clone(), 0..nope)], 3);
    [keys, features::<B>(kv, nope..both)]
}

pub fn grads_unfused<B: LocalKernels>(
    [keys, values]: [Float<B>; 2],
    angles: [Float<B>; 2],
    nope: usize,
) -> [Float<B>; 2] {
    let shape = keys.shape();
    let [s, b, length] = [shape[0], shape[1], shape[3]];
    let rotated = length - nope;
    let shared = B::sum_dim(features::<B>(keys.clone(), 0..rotated), 2);
    let shared = B::float_reshape(shared, Shape::from([s, b, rotated]));
    let kv = B::float_cat(vec![features::<B>(keys, rotated..length), values], 3);
    [kv, rotated_key::<B>(shared, angles, Rotation::Back)]
}

/// `x [s, b, rope]`, rotated.
fn rotated_key<B: LocalKernels>(x: Float<B>, [cos, sin]: [Float<B>; 2], rotation: Rotation) -> Float<B> {
    let (shape, rows) = (x.shape(), cos.shape()[0]);
    let heads = B::float_reshape(x, Shape::from([rows, shape[0] * shape[1] / rows, 1, shape[2]]));
    B::float_reshape(B::rope_apply(heads, cos, sin, 1, rotation), shape)
}

fn features<B: Backend>(x: Float<B>, range: std::ops::Range<usize>) -> Float<B> {
    B::float_slice(x, &[Slice::full(), Slice::full(), Slice::full(), Slice::from(range)])
}

operation! {
    /// The constants are cos and sin. Returns the keys; the values are the only one of the `secondary` outputs.
    Keys { nope: usize, secondary: SecondaryOutputs }, 2, ([Float<B>; 2], usize, SecondaryOutputs),
    |[kv, shared], Tensors { floats, .. }, _| {
        let angles: [Float<B>; 2] = floats.try_into().expect("cos and sin");
        let [keys, values] = B::latent_keys(kv, shared, angles.clone(), nope);
        secondary.put::<B>([values]);
        (keys, Some((angles, nope, secondary)))
    },
    |(angles, nope, secondary), keys, parents| {
        let values = secondary.gradients::<B>().remove(0);
        parents.register::<B>(B::latent_keys_grads([keys, values], angles, nope));
    },
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device, Distribution};

    use super::*;
    use crate::{expand_dim, rope};

    /// Values and gradients are those of separate operations, bit for bit; with angles per position and per sample.
    #[test]
    fn keys_and_values_are_those_of_separate_operations() {
        let device = Device::flex().autodiff();
        let [s, b, heads, rotated, nope, value] = [3, 2, 5, 4, 3, 6];
        for (dtype, rows) in [(DType::F64, s), (DType::F64, s * b), (DType::F32, s), (DType::BF16, s * b)] {
            let on = (&device, dtype);
            let random = |shape: [usize; 4]| Tensor::<4>::random(shape, Distribution::Default, on);
            let kv = random([s, b, heads, nope + value]).require_grad();
            let shared: Tensor<3> = random([1, s, b, rotated]).reshape([s, b, rotated]).require_grad();
            let [cos, sin] = [(); 2].map(|()| random([1, 1, rows, rotated / 2]).reshape([rows, rotated / 2]));
            let slopes = [random([s, b, heads, rotated + nope]), random([s, b, heads, value])];

            let rotated_key = rope(shared.clone().reshape([rows, s * b / rows, 1, rotated]), cos.clone(), sin.clone());
            let rotated_key = expand_dim(rotated_key.reshape([s, b, 1, rotated]), 2, heads);
            let apart =
                [Tensor::cat(vec![rotated_key, kv.clone().narrow(3, 0, nope)], 3), kv.clone().narrow(3, nope, value)];
            let whole = latent_keys(kv.clone(), shared.clone(), [cos, sin], nope);
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
