//! Emulated FP8: values on the FP8 grid, stored in the type of the computation.

use burn::backend::flex::FlexTensor;
use burn::backend::{DType, Flex, Shape, ops::FloatTensorOps};

use super::{cast, compute_type, dense, lanes, linear, output::filled_rows, real::Real};
use burn::tensor::Tensor;

use crate::fp8::{Fp8Kernels, Matrix, Number, Precision, Quantized, Scales, Sides};
use crate::plain;
use ranks::collective_ops::{Collective, CollectiveOps};
use ranks::comm::Group;

/// Rough cost of one element in picoseconds.
const COST: usize = 500;

/// Rounding to 8-bit floats.
pub(super) trait Grid: Real {
    /// The nearest value of a format with `(mantissa bits, exponent bias)`, ties to even, clamped to `most`. NaN is
    /// unchanged.
    fn on_grid(self, fields: (i32, i32), most: Self) -> Self;
    /// Whether it is neither zero, infinite nor NaN.
    fn is_size(self) -> bool;
    const LARGEST: Self;
}

macro_rules! grid {
    ($E:ident, $I:ident, $bits:literal, $exponents:literal) => {
        impl Grid for $E {
            const LARGEST: Self = $E::MAX;

            #[inline(always)]
            fn on_grid(self, (mantissa, bias): (i32, i32), most: Self) -> Self {
                const ZERO: i32 = $exponents >> 1;
                let x = self.clamp(-most, most);
                let exponent = ((x.to_bits() >> $bits) & $exponents) as i32 - ZERO;
                // Subnormals have the spacing of the smallest normal numbers.
                let exponent = exponent.max(1 - bias) - mantissa;
                let step = $E::from_bits(((ZERO + exponent) as $I) << $bits);
                // Adding 1.5 · 2ᵐ, m being the bits of the mantissa, rounds to an integer without a call.
                const ROUND: $E = 1.5 * (1u64 << $bits) as $E;
                ((x / step + ROUND) - ROUND) * step
            }

            fn is_size(self) -> bool {
                self > 0.0 && self.is_finite()
            }
        }
    };
}

grid!(f32, u32, 23, 0xff);
grid!(f64, u64, 52, 0x7ff);

/// The amax, ignoring NaN.
pub(super) fn amax<E: Grid>(x: &[E]) -> E {
    let magnitudes = x.chunks(4096).map(|chunk| {
        let low = chunk.iter().fold(E::ZERO, |low, &x| if x < low { x } else { low });
        let high = lanes::max(chunk);
        if high > -low { high } else { -low }
    });
    magnitudes.fold(E::ZERO, |top, x| if x > top { x } else { top })
}

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

    fn fp8_cast(x: FlexTensor, scales: &Scales<Self>, number: Number, sides: Sides) -> Quantized<Self> {
        let inner = compute_type(x.dtype());
        let x = dense(x, inner);
        let columns = *x.layout().shape().to_vec().last().expect("an operand has features");
        let rows = x.layout().num_elements() / columns.max(1);
        let shape = Shape::new([rows, columns]);
        let data = by_real!(inner, E => {
            E::tensor(on_grid::<E>(E::slice(&x), E::slice(&scales.scale)[0], number), shape)
        });
        let matrix = |data, rows, inner| Matrix { data, rows, inner, inverse: scales.inverse.clone(), number };
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
