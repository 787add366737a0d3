//! Emulated FP8: values on the FP8 grid, stored in the type of the computation.

use burn::backend::flex::FlexTensor;
use burn::backend::{DType, Flex, Shape, ops::FloatTensorOps};

use super::fp8_grid::{COST, Grid, amax};
use super::{cast, compute_type, dense, fp8_blocks as blocks, linear, output::filled_rows, real::Real};
use burn::tensor::Tensor;

use crate::fp8::{Fp8Kernels, Granularity, Matrix, Number, Precision, Quantized, Scales, Scaling, Sides};
use crate::plain;
use ranks::collective_ops::{Collective, CollectiveOps};
use ranks::comm::Group;

fn scales<E: Grid>(amax: &FlexTensor, number: Number, margin: u32) -> Scales<Flex> {
    let scale = |&amax: &E| match amax.is_size() {
        true => {
            let scale = E::of(number.max()) / amax * E::of(2f64.powi(-(margin as i32)));
            if scale < E::LARGEST { scale } else { E::LARGEST }
        }
        false => E::ONE,
    };
    let scale: Vec<E> = E::slice(amax).iter().map(scale).collect();
    let inverse = scale.iter().map(|&scale| E::ONE / scale).collect();
    let [scale, inverse] = [scale, inverse].map(|x| E::tensor(x, amax.layout().shape().clone()));
    Scales { scale, inverse }
}

/// `scale · x`, rounded to the grid.
pub(super) fn on_grid<E: Grid>(x: &[E], scale: E, number: Number) -> Vec<E> {
    let (fields, most) = (number.fields(), E::of(number.max()));
    filled_rows([x.len(), 1], COST, |_, span, out| {
        for (&x, out) in x[span].iter().zip(out) {
            *out = (x * scale).on_grid(fields, most);
        }
    })
}

/// `a · bᵀ`, divided by both scales.
pub(super) fn gemm<E: Grid>(a: Matrix<Flex>, b: Matrix<Flex>) -> FlexTensor {
    let factor = E::slice(&a.inverse)[0] * E::slice(&b.inverse)[0];
    let y = linear::forward::<E>(a.data, b.data);
    let y: Vec<E> = E::slice(&y).iter().map(|&y| y * factor).collect();
    E::tensor(y, Shape::new([a.rows, b.rows]))
}

impl Fp8Kernels for Flex {
    fn fp8_tensor(x: FlexTensor) -> Tensor<1> {
        Tensor::from_primitive::<Self>(x)
    }

    fn fp8_primitive(x: Tensor<1>) -> FlexTensor {
        x.try_into_primitive::<Self>().expect("scales are where the layer is")
    }

    fn fp8_amax(x: FlexTensor) -> FlexTensor {
        let inner = compute_type(x.dtype());
        let x = dense(x, inner);
        by_real!(inner, E => E::tensor(vec![amax::<E>(E::slice(&x))], Shape::new([1])))
    }

    fn fp8_scales(found: FlexTensor, number: Number, margin: u32) -> Scales<Self> {
        by_real!(found.dtype(), E => scales::<E>(&found, number, margin))
    }

    fn fp8_cast(x: FlexTensor, scaling: &Scaling<Self>, number: Number, sides: Sides) -> Quantized<Self> {
        let Scaling::Tensor(scales) = scaling else {
            return blocks::cast(x, scaling.granularity() == Granularity::Block, number, sides);
        };
        let inner = compute_type(x.dtype());
        let x = dense(x, inner);
        let columns = *x.layout().shape().to_vec().last().expect("an operand has features");
        let rows = x.layout().num_elements() / columns.max(1);
        let shape = Shape::new([rows, columns]);
        let data = by_real!(inner, E => {
            E::tensor(on_grid::<E>(E::slice(&x), E::slice(&scales.scale)[0], number), shape)
        });
        let (inverse, granularity) = (scales.inverse.clone(), Granularity::Tensor);
        let matrix = |data, rows, inner| Matrix { data, rows, inner, inverse: inverse.clone(), granularity, number };
        Quantized {
            by_rows: sides.by_rows.then(|| matrix(data.clone(), rows, columns)),
            by_columns: sides.by_columns.then(|| matrix(Self::float_transpose(data), columns, rows)),
        }
    }

    fn fp8_transposed(x: Matrix<Self>) -> Matrix<Self> {
        Matrix { data: Self::float_transpose(x.data), rows: x.inner, inner: x.rows, ..x }
    }

    fn fp8_gathered(x: Matrix<Self>, group: &Group) -> Matrix<Self> {
        let data = Self::collective(x.data, Collective::AllGather(0), None, group.clone());
        Matrix { data, rows: x.rows * group.size(), ..x }
    }

    fn fp8_gathered_inner(x: Matrix<Self>, group: &Group) -> Matrix<Self> {
        let data = Self::collective(x.data, Collective::AllGather(1), None, group.clone());
        Matrix { data, inner: x.inner * group.size(), ..x }
    }

    fn fp8_gemm(
        a: Matrix<Self>,
        b: Matrix<Self>,
        bias: Option<FlexTensor>,
        (shape, dtype): (Shape, DType),
        _: Precision,
    ) -> FlexTensor {
        let inner = a.data.dtype();
        let y = Self::float_reshape(by_real!(inner, E => gemm::<E>(a, b)), shape);
        let y = bias.into_iter().fold(y, |y, bias| plain::linear::add_bias::<Self>(y, cast(bias, inner)));
        cast(y, dtype)
    }

    fn fp8_accumulate(_: Matrix<Self>, _: Matrix<Self>, sum: &FlexTensor, _: bool) {
        panic!("main gradients are not summed up in place on the CPU: {:?}", sum.layout().shape())
    }
}
