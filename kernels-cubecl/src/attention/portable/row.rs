//! Rows of `[seq, batch, heads, length]` tensors, to and from a unit's local memory.
use cubecl::prelude::*;

/// Offset of a row.
#[cube]
pub fn at<E: Float>(x: &Tensor<E>, row: u32, batch: u32, head: u32) -> usize {
    row as usize * x.stride(0) + batch as usize * x.stride(1) + head as usize * x.stride(2)
}

/// Reads the row at `from` into `to`.
#[cube]
pub fn read<E: Float, A: Float>(x: &Tensor<E>, from: usize, to: &mut Array<A>, #[comptime] length: usize) {
    for i in 0..length {
        to[i] = A::cast_from(x[from + i]);
    }
}

/// Writes a row.
#[cube]
pub fn write<E: Float, A: Float>(
    x: &mut Tensor<E>,
    row: u32,
    batch: u32,
    head: u32,
    from: &Array<A>,
    #[comptime] length: usize,
) {
    let to = row as usize * x.stride(0) + batch as usize * x.stride(1) + head as usize * x.stride(2);
    for i in 0..length {
        x[to + i] = E::cast_from(from[i]);
    }
}

/// All zero.
#[cube]
pub fn fill<A: Float>(x: &mut Array<A>, #[comptime] length: usize) {
    for i in 0..length {
        x[i] = A::new(0.0);
    }
}

/// `x *= factor`.
#[cube]
pub fn scale<A: Float>(x: &mut Array<A>, factor: A, #[comptime] length: usize) {
    for i in 0..length {
        x[i] = x[i] * factor;
    }
}

/// The dot product of the row at `from` with `with`.
#[cube]
pub fn dot<E: Float, A: Float>(x: &Tensor<E>, from: usize, with: &Array<A>, #[comptime] length: usize) -> A {
    let mut sum = A::new(0.0);
    for i in 0..length {
        sum += A::cast_from(x[from + i]) * with[i];
    }
    sum
}

/// `sum += factor · row`.
#[cube]
pub fn add<E: Float, A: Float>(sum: &mut Array<A>, x: &Tensor<E>, from: usize, factor: A, #[comptime] length: usize) {
    for i in 0..length {
        sum[i] = sum[i] + factor * A::cast_from(x[from + i]);
    }
}
