//! Sums along a dimension as products with ones, by cuBLASLt: always the same algorithm, and sums at least in f32.

use burn::backend::{Cube, DType, FloatDType, Scalar, TensorMetadata, ops::FloatTensorOps};
use burn::tensor::Shape;

use super::{Float, is_here};
use crate::cuda::lt::{Operand, product};

/// Sum over dimension `dim`, of which one element stays.
pub fn sum_dim(x: Float, dim: usize) -> Float {
    let mut shape = x.meta.shape().to_vec();
    let (n, dtype) = (shape[dim], x.dtype());
    let is_float = matches!(dtype, DType::F64 | DType::F32 | DType::BF16 | DType::F16);
    if !is_here(&x) || !is_float {
        return Cube::float_sum_dim(x, dim);
    }
    if n == 1 {
        return x;
    }
    let before: usize = shape[..dim].iter().product();
    let behind: usize = shape[dim + 1..].iter().product();
    // A vector: a matrix of one column would be padded.
    let ones = Cube::float_ones(Shape::from([n]), &x.device(), FloatDType::from(dtype));
    let reshaped = |x, shape: [usize; 2]| Operand::flat(Cube::float_reshape(x, Shape::from(shape)));
    shape[dim] = 1;
    let shape = Shape::from(shape);
    if before == 1 {
        return product(reshaped(ones, [1, n]), reshaped(x, [n, behind]), shape, dtype);
    }
    let last = shape.num_dims() - 1;
    // To the end, so that it is one product and not one for each of many small matrices.
    let order: Vec<usize> = (0..dim).chain(dim + 1..=last).chain([dim]).collect();
    let x = if behind == 1 { x } else { Cube::float_permute(x, &order) };
    product(reshaped(x, [before * behind, n]), reshaped(ones, [n, 1]), shape, dtype)
}

/// [`sum_dim`] divided by the size of the dimension.
pub fn mean_dim(x: Float, dim: usize) -> Float {
    let n = x.meta.shape()[dim];
    Cube::float_div_scalar(sum_dim(x, dim), Scalar::Float(n as f64))
}
