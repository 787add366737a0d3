//! Sums along a dimension as cuBLASLt GEMMs with ones: always the same algorithm, at least in f32. A few slices are
//! added one by one instead.

use burn::backend::{Cube, DType, FloatDType, Scalar, Slice, TensorMetadata, ops::FloatTensorOps};
use burn::tensor::Shape;

use super::{Float, is_here};
use gpu::cuda::lt::{Operand, gemm};

/// Up to this many slices are added one by one, instead of a GEMM of very many rows of very few elements.
const FEW: usize = 16;

/// Sum over dimension `dim`, which becomes 1.
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
    // A vector, because CubeCL would pad a matrix of one column.
    let ones = Cube::float_ones(Shape::from([n]), &x.device(), FloatDType::from(dtype));
    let reshaped = |x, shape: [usize; 2]| Operand::flat(Cube::float_reshape(x, Shape::from(shape)));
    shape[dim] = 1;
    let shape = Shape::from(shape);
    if before == 1 {
        return gemm(reshaped(ones, [1, n]), reshaped(x, [n, behind]), shape, dtype);
    }
    if behind > 1 && n <= FEW {
        let x = Cube::float_reshape(x, Shape::from([before, n, behind]));
        return Cube::float_reshape(added(x), shape);
    }
    let last = shape.num_dims() - 1;
    // Moved to the end: one GEMM instead of many small ones.
    let order: Vec<usize> = (0..dim).chain(dim + 1..=last).chain([dim]).collect();
    let x = if behind == 1 { x } else { Cube::float_permute(x, &order) };
    gemm(reshaped(x, [before * behind, n]), reshaped(ones, [n, 1]), shape, dtype)
}

/// The sum over the middle one of three dimensions, slice by slice.
fn added(x: Float) -> Float {
    let (dtype, size) = (x.dtype(), x.meta.shape().to_vec());
    let wide = FloatDType::from(if dtype == DType::F64 { DType::F64 } else { DType::F32 });
    let slice = |i: usize| {
        let at = [Slice::from(0..size[0]), Slice::from(i..i + 1), Slice::from(0..size[2])];
        Cube::float_cast(Cube::float_slice(x.clone(), &at), wide)
    };
    let sum = (0..size[1]).map(slice).reduce(Cube::float_add).expect("several slices");
    Cube::float_cast(sum, FloatDType::from(dtype))
}

/// [`sum_dim`] divided by the size of the dimension.
pub fn mean_dim(x: Float, dim: usize) -> Float {
    let n = x.meta.shape()[dim];
    Cube::float_div_scalar(sum_dim(x, dim), Scalar::Float(n as f64))
}
