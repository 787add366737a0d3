//! Matrix products, all by cuBLASLt where the operands lie.

use burn::backend::{Cube, tensor::FloatTensor};
use burn::tensor::Shape;
use burn_cubecl::tensor::CubeTensor;

use crate::cuda::lt::{Onto, Operand, multiply, product};

type Float = FloatTensor<Cube>;

/// `[.., m, k] · [.., k, n]`.
pub fn matmul(a: Float, b: Float) -> Float {
    let (left, right) = (a.meta.shape().to_vec(), b.meta.shape().to_vec());
    let lead = left.len() - 2;
    assert_eq!(left[..lead], right[..lead], "matrix product: {left:?} · {right:?} are batches of different sizes");
    let mut shape = left;
    shape[lead + 1] = right[lead + 1];
    let dtype = a.dtype;
    product(Operand::batched(a), Operand::batched(b), Shape::from(shape), dtype)
}

pub fn forward(x: Float, w: Float) -> Float {
    let (shape, dtype) = (with_last(&x, w.meta.shape()[0]), x.dtype);
    product(Operand::flat(x), Operand::flat(w).transposed(), shape, dtype)
}

pub fn input_grad(grad: Float, w: Float) -> Float {
    let (shape, dtype) = (with_last(&grad, w.meta.shape()[1]), grad.dtype);
    product(Operand::flat(grad), Operand::flat(w), shape, dtype)
}

pub fn weight_grad(grad: Float, x: Float) -> Float {
    let dtype = x.dtype;
    let (grad, x) = (Operand::flat(grad).transposed(), Operand::flat(x));
    let shape = Shape::from([grad.rows(), x.columns()]);
    product(grad, x, shape, dtype)
}

/// The product is added by the library, in f32, where the sum lies.
pub fn accumulate_weight_grad(grad: Float, x: Float, sum: &CubeTensor, add: bool) {
    let onto = if add { Onto::Add } else { Onto::Replace };
    multiply(Operand::flat(grad).transposed(), Operand::flat(x), sum, onto);
}

/// The shape of `x` with another last dimension.
fn with_last(x: &CubeTensor, last: usize) -> Shape {
    let mut shape = x.meta.shape().to_vec();
    *shape.last_mut().expect("a linear operand has features") = last;
    Shape::from(shape)
}
