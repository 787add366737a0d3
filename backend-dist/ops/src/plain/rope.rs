//! Rotate-half position embedding.

use burn::backend::{Backend, tensor::FloatTensor as Float};

use super::{dims, narrow, reshape, widen};
use crate::dtype::cast;
use crate::options::Rotation;

pub fn apply<B: Backend>(x: Float<B>, cos: Float<B>, sin: Float<B>, heads: usize, rotation: Rotation) -> Float<B> {
    let shape = dims(&x);
    let (s, half) = (shape[0], dims(&cos)[1]);
    let (x, dtype) = widen::<B>(x);
    let angles = |t: Float<B>| reshape::<B>(widen::<B>(t).0, [s, 1, 1, half]);
    let (cos, sin) = (angles(cos), angles(sin));
    let sin = match rotation {
        Rotation::Forward => sin,
        Rotation::Back => B::float_neg(sin),
    };
    if heads == 0 || half == 0 {
        return cast::<B>(x, dtype);
    }
    let turned = narrow::<B>(x.clone(), 2, 0, heads);
    let (a, b) = (narrow::<B>(turned.clone(), 3, 0, half), narrow::<B>(turned.clone(), 3, half, 2 * half));
    let first = B::float_sub(B::float_mul(a.clone(), cos.clone()), B::float_mul(b.clone(), sin.clone()));
    let second = B::float_add(B::float_mul(b, cos), B::float_mul(a, sin));
    let mut parts = vec![first, second];
    if 2 * half < shape[3] {
        parts.push(narrow::<B>(turned, 3, 2 * half, shape[3]));
    }
    let mut out = B::float_cat(parts, 3);
    if heads < shape[2] {
        out = B::float_cat(vec![out, narrow::<B>(x, 2, heads, shape[2])], 2);
    }
    cast::<B>(out, dtype)
}
