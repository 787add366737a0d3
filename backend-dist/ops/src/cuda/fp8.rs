//! FP8 on NVIDIA GPUs: bytes in `u8` tensors of one dimension, scales in f32 on the device.

use burn::backend::{Cube, DType, Shape, TensorMetadata};
use burn::tensor::Tensor;
use burn_cubecl::tensor::CubeTensor;
use cubecl::server::Handle;
use kernels_cubecl::fp8::{Codec, Format, amax, blocks, blocks::Written, cast, transpose};

use super::{Float, are_half, columns, empty, launched, packed, rows, work};
use crate::fp8::{Fp8Kernels, Granularity, Matrix, Number, Precision, Quantized, Scales, Scaling, Sides};
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
    let Matrix { data, rows, inner, inverse, granularity, number } = x;
    Operand { bytes: data, inverse, granularity: *granularity, format: format(*number), rows: *rows, inner: *inner }
}

pub(super) fn to_write(x: &Option<Matrix<Cube>>) -> Option<Written<'_>> {
    x.as_ref().map(|x| Written { bytes: &x.data.handle, inverse: &x.inverse.handle })
}

fn gathered(x: Float, group: &Group) -> Float {
    Cube::collective(x, Collective::AllGather(0), None, group.clone())
}

/// The lines of `count` matrices, which lie one behind the other, side by side. Lines are whole words of four bytes.
fn side_by_side(x: &CubeTensor, count: usize, line: usize) -> CubeTensor {
    let (all, words) = (x.meta.num_elements(), line * x.dtype.size() / 4);
    let of = |shape: Shape, handle: &Handle, dtype| {
        CubeTensor::new_contiguous(x.client.clone(), x.device.clone(), shape, handle.clone(), dtype)
    };
    let mut matrices = of(Shape::new([count, all / (count * line), words]), &x.handle, DType::U32);
    matrices.meta.swap(0, 1);
    of(Shape::new([all]), &packed(matrices).handle, x.dtype)
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

    fn fp8_cast(x: Float, scaling: &Scaling<Self>, number: Number, sides: Sides) -> Quantized<Self> {
        let written = usize::from(sides.by_rows) + usize::from(sides.by_columns);
        let _noted = work::memory("cast to FP8", &x, |bytes| bytes + bytes / x.dtype.size() * written);
        let (rows, columns, x) = (rows(&x), columns(&x), half(x));
        let bytes = |wanted: bool| wanted.then(|| empty(&x, [rows * columns], DType::U8));
        let (by_rows, by_columns) = (bytes(sides.by_rows), bytes(sides.by_columns));
        let granularity = scaling.granularity();
        let Scaling::Tensor(scales) = scaling else {
            let form = |data: Option<Float>, rows, inner| {
                let [lines, line] = granularity.scales(rows, inner);
                let inverse = |data: &Float| empty(data, [lines * line], DType::F32);
                data.map(|data| Matrix { inverse: inverse(&data), data, rows, inner, granularity, number })
            };
            let (by_rows, by_columns) = (form(by_rows, rows, columns), form(by_columns, columns, rows));
            let targets = [&by_rows, &by_columns].map(to_write);
            let (how, sizes) = ((granularity, format(number), Codec::Instruction), [1, rows, columns]);
            launched("cast to FP8", by_half!(x, E => blocks::cast::<E>(&x.client, &x.handle, targets, how, sizes)));
            return Quantized { by_rows, by_columns };
        };
        let conversion = cast::Conversion { format: format(number), codec: Codec::Instruction, rows, columns };
        let [lines, turned] = [&by_rows, &by_columns].map(|x| x.as_ref().map(|x| &x.handle));
        let scale = &scales.scale.handle;
        let done = by_half!(x, E => cast::cast::<E>(&x.client, &x.handle, scale, lines, turned, conversion));
        launched("cast to FP8", done);
        let inverse = || scales.inverse.clone();
        let matrix = |data, rows, inner| Matrix { data, rows, inner, inverse: inverse(), granularity, number };
        Quantized {
            by_rows: by_rows.map(|data| matrix(data, rows, columns)),
            by_columns: by_columns.map(|data| matrix(data, columns, rows)),
        }
    }

    fn fp8_transposed(x: Matrix<Self>) -> Matrix<Self> {
        let Matrix { data, rows, inner, inverse, granularity, number } = x;
        assert_eq!(granularity, Granularity::Tensor, "scales of rows are not those of columns");
        let _noted = work::memory("FP8 transpose", &data, |bytes| 2 * bytes);
        let turned = empty(&data, [rows * inner], DType::U8);
        launched("FP8 transpose", transpose::transpose(&data.client, &data.handle, &turned.handle, rows, inner));
        Matrix { data: turned, rows: inner, inner: rows, inverse, granularity, number }
    }

    fn fp8_gathered(x: Matrix<Self>, group: &Group) -> Matrix<Self> {
        let inverse = match x.granularity {
            Granularity::Tensor => x.inverse,
            Granularity::Vector => side_by_side(&gathered(x.inverse, group), group.size(), x.rows),
            Granularity::Block => panic!("weights, which alone have scales of blocks, are not gathered"),
        };
        let data = Self::collective_int(x.data, Collective::AllGather(0), group.clone());
        Matrix { data, rows: x.rows * group.size(), inverse, ..x }
    }

    fn fp8_gathered_inner(x: Matrix<Self>, group: &Group) -> Matrix<Self> {
        let bytes = Self::collective_int(x.data, Collective::AllGather(0), group.clone());
        let data = side_by_side(&bytes, group.size(), x.inner);
        Matrix { data, inner: x.inner * group.size(), inverse: gathered(x.inverse, group), ..x }
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
