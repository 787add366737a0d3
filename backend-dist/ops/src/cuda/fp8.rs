//! FP8 on NVIDIA GPUs: bytes in `u8` tensors of one dimension, scales in f32 on the device.

use burn::backend::{Cube, DType, Shape, TensorMetadata};
use burn::tensor::Tensor;
use burn_cubecl::tensor::CubeTensor;
use kernels_cubecl::fp8::{Codec, Format, amax, cast, transpose};

use super::{Float, are_half, columns, empty, launched, packed, rows, work};
use crate::fp8::{Fp8Kernels, Matrix, Number, Precision, Quantized, Scales, Sides};
use gpu::cuda::lt_fp8::{Onto, Operand, Sums, multiply};
use ranks::collective_ops::{Collective, CollectiveOps};
use ranks::comm::Group;

pub(super) fn format(number: Number) -> Format {
    match number {
        Number::E4m3 => Format::E4m3,
        Number::E5m2 => Format::E5m2,
    }
}

/// `x` in a layout that the kernels can read.
///
/// # Panics
/// If it has another type, or is on another device.
pub(super) fn half(x: Float) -> CubeTensor {
    assert!(are_half([&x]), "FP8 layers on GPUs take bf16 or f16 on CUDA, not {:?} on {:?}", x.dtype(), x.device);
    packed(x)
}

pub(super) fn sums(precision: Precision) -> Sums {
    match precision {
        Precision::Fast => Sums::Fast,
        Precision::Full => Sums::Exact,
    }
}

fn operand(x: &Matrix<Cube>) -> Operand<'_> {
    let Matrix { data, rows, inner, inverse, number } = x;
    Operand { bytes: data, inverse, format: format(*number), rows: *rows, inner: *inner }
}

impl Fp8Kernels for Cube {
    fn fp8_tensor(x: Float) -> Tensor<1> {
        Tensor::from_primitive::<Self>(x)
    }

    fn fp8_primitive(x: Tensor<1>) -> Float {
        x.try_into_primitive::<Self>().expect("scales are where the layer is")
    }

    fn fp8_amax(x: Float) -> Float {
        let _noted = work::memory("FP8 amax", &x, |bytes| bytes);
        let x = half(x);
        let (found, len) = (empty(&x, [1], DType::F32), x.meta.shape().num_elements());
        launched("FP8 amax", by_half!(x, E => amax::amax::<E>(&x.client, &x.handle, &found.handle, len)));
        found
    }

    fn fp8_scales(amax: Float, number: Number, margin: u32) -> Scales<Self> {
        let (count, amax) = (amax.meta.shape().num_elements(), packed(amax));
        let [scale, inverse] = [(); 2].map(|()| empty(&amax, [count], DType::F32));
        let to = [&scale.handle, &inverse.handle];
        launched("FP8 scale", amax::scale(&amax.client, &amax.handle, to, count, format(number), margin as i32));
        Scales { scale, inverse }
    }

    fn fp8_cast(x: Float, scales: &Scales<Self>, number: Number, sides: Sides) -> Quantized<Self> {
        let written = usize::from(sides.by_rows) + usize::from(sides.by_columns);
        let _noted = work::memory("cast to FP8", &x, |bytes| bytes + bytes / x.dtype.size() * written);
        let (rows, columns, x) = (rows(&x), columns(&x), half(x));
        let bytes = |wanted: bool| wanted.then(|| empty(&x, [rows * columns], DType::U8));
        let (by_rows, by_columns) = (bytes(sides.by_rows), bytes(sides.by_columns));
        let conversion = cast::Conversion { format: format(number), codec: Codec::Instruction, rows, columns };
        let [lines, turned] = [&by_rows, &by_columns].map(|x| x.as_ref().map(|x| &x.handle));
        let scale = &scales.scale.handle;
        let done = by_half!(x, E => cast::cast::<E>(&x.client, &x.handle, scale, lines, turned, conversion));
        launched("cast to FP8", done);
        let matrix = |data, rows, inner| Matrix { data, rows, inner, inverse: scales.inverse.clone(), number };
        Quantized {
            by_rows: by_rows.map(|data| matrix(data, rows, columns)),
            by_columns: by_columns.map(|data| matrix(data, columns, rows)),
        }
    }

    fn fp8_transposed(x: Matrix<Self>) -> Matrix<Self> {
        let Matrix { data, rows, inner, inverse, number } = x;
        let _noted = work::memory("FP8 transpose", &data, |bytes| 2 * bytes);
        let turned = empty(&data, [rows * inner], DType::U8);
        launched("FP8 transpose", transpose::transpose(&data.client, &data.handle, &turned.handle, rows, inner));
        Matrix { data: turned, rows: inner, inner: rows, inverse, number }
    }

    fn fp8_gathered(x: Matrix<Self>, group: &Group) -> Matrix<Self> {
        let data = Self::collective_int(x.data, Collective::AllGather(0), group.clone());
        Matrix { data, rows: x.rows * group.size(), ..x }
    }

    fn fp8_gemm(
        a: Matrix<Self>,
        b: Matrix<Self>,
        bias: Option<Float>,
        (shape, dtype): (Shape, DType),
        precision: Precision,
    ) -> Float {
        let out = empty(&a.data, shape, dtype);
        multiply(operand(&a), operand(&b), bias.map(packed).as_ref(), &out, Onto::Replace, sums(precision));
        out
    }

    fn fp8_accumulate(a: Matrix<Self>, b: Matrix<Self>, sum: &Float, add: bool) {
        assert_eq!(sum.dtype(), DType::F32, "a main gradient is f32");
        let onto = if add { Onto::Add } else { Onto::Replace };
        multiply(operand(&a), operand(&b), None, sum, onto, Sums::Exact);
    }
}
