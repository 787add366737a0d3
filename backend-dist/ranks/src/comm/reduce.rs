//! Arithmetic of the in-process transport on host tensors: always in group order, so every run gives the same bits.

use super::ReduceOp;
use burn::backend::flex::{FlexTensor, Layout};
use burn::tensor::{Bytes, DType, Element, Shape};
use half::{bf16, f16};
use rayon::prelude::*;

/// Elements summed at a time, so that the running sum stays in the first-level cache.
const CHUNK: usize = 2048;
/// Elements from which a second thread pays.
const PARALLEL: usize = 128 * 1024;

/// Element-wise reduction of tensors of equal shape and type, in order. 16-bit floats are accumulated in f32 and
/// rounded once.
pub(crate) fn reduce(inputs: Vec<FlexTensor>, op: ReduceOp) -> FlexTensor {
    match inputs[0].dtype() {
        DType::F64 => fold::<f64, f64>(inputs, op),
        DType::F32 => fold::<f32, f32>(inputs, op),
        DType::BF16 => fold::<bf16, f32>(inputs, op),
        DType::F16 => fold::<f16, f32>(inputs, op),
        DType::I64 => fold::<i64, i64>(inputs, op),
        DType::I32 => fold::<i32, i32>(inputs, op),
        DType::U8 => fold::<u8, u8>(inputs, op),
        other => panic!("no reduction for element type {other:?}; reducible: F64, F32, BF16, F16, I64, I32, U8"),
    }
}

trait Accumulate<A: Copy>: Copy {
    fn widen(self) -> A;
    fn narrow(value: A) -> Self;
}

macro_rules! accumulate {
    ($($t:ty => $a:ty, $widen:expr, $narrow:expr;)*) => {$(
        impl Accumulate<$a> for $t {
            fn widen(self) -> $a { $widen(self) }
            fn narrow(value: $a) -> Self { $narrow(value) }
        }
    )*};
}
accumulate! {
    f64 => f64, |x| x, |x| x;
    f32 => f32, |x| x, |x| x;
    bf16 => f32, bf16::to_f32, bf16::from_f32;
    f16 => f32, f16::to_f32, f16::from_f32;
    i64 => i64, |x| x, |x| x;
    i32 => i32, |x| x, |x| x;
    u8 => u8, |x| x, |x| x;
}

fn fold<E, A>(inputs: Vec<FlexTensor>, op: ReduceOp) -> FlexTensor
where
    E: Element + bytemuck::Pod + Accumulate<A> + Send + Sync,
    A: Copy + PartialOrd + std::ops::Add<Output = A> + Send + Sync,
{
    // A NaN of any rank reaches every rank: comparisons with it are false, so it must be asked for.
    match op {
        ReduceOp::Sum => fold_with::<E, A>(inputs, |a, b| a + b),
        ReduceOp::Max => fold_with::<E, A>(inputs, |a, b| if a > b || is_nan(a) { a } else { b }),
        ReduceOp::Min => fold_with::<E, A>(inputs, |a, b| if a < b || is_nan(a) { a } else { b }),
    }
}

fn fold_with<E, A>(inputs: Vec<FlexTensor>, combine: impl Fn(A, A) -> A + Sync) -> FlexTensor
where
    E: Element + bytemuck::Pod + Accumulate<A> + Send + Sync,
    A: Copy + Send + Sync,
{
    let inputs: Vec<FlexTensor> = inputs.into_iter().map(|x| x.to_contiguous()).collect();
    let slices: Vec<&[E]> = inputs.iter().map(|x| x.as_slice::<E>().expect("contiguous, of this type")).collect();
    let mut out: Vec<E> = vec![bytemuck::Zeroable::zeroed(); slices[0].len()];
    let reduce_chunk = |(index, out): (usize, &mut [E])| {
        let range = index * CHUNK..index * CHUNK + out.len();
        let mut sum: Vec<A> = slices[0][range.clone()].iter().map(|x| x.widen()).collect();
        for slice in &slices[1..] {
            for (sum, x) in sum.iter_mut().zip(&slice[range.clone()]) {
                *sum = combine(*sum, x.widen());
            }
        }
        for (out, sum) in out.iter_mut().zip(sum) {
            *out = E::narrow(sum);
        }
    };
    if out.len() >= PARALLEL {
        out.par_chunks_mut(CHUNK).enumerate().for_each(reduce_chunk);
    } else {
        out.chunks_mut(CHUNK).enumerate().for_each(reduce_chunk);
    }
    FlexTensor::new(Bytes::from_elems(out), Layout::contiguous(inputs[0].layout().shape().clone()), inputs[0].dtype())
}

#[allow(clippy::eq_op)]
fn is_nan<A: PartialOrd>(x: A) -> bool {
    x != x
}

/// Concatenation along `dim`; all other dimensions must agree.
pub(crate) fn concat(inputs: &[FlexTensor], dim: usize) -> FlexTensor {
    let first = inputs[0].layout().shape().to_vec();
    let width = inputs[0].dtype().size();
    let inner: usize = first[dim + 1..].iter().product::<usize>() * width;
    let outer: usize = first[..dim].iter().product();
    let inputs: Vec<FlexTensor> = inputs.iter().map(FlexTensor::to_contiguous).collect();
    let rows: Vec<usize> = inputs.iter().map(|x| x.layout().shape()[dim]).collect();
    let mut shape = first;
    shape[dim] = rows.iter().sum();
    let mut out = Vec::with_capacity(outer * shape[dim] * inner);
    for block in 0..outer {
        for (x, rows) in inputs.iter().zip(&rows) {
            let start = x.layout().start_offset() * width + block * rows * inner;
            out.extend_from_slice(&x.bytes()[start..start + rows * inner]);
        }
    }
    FlexTensor::new(Bytes::from_bytes_vec(out), Layout::contiguous(Shape::from(shape)), inputs[0].dtype())
}
