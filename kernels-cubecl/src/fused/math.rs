//! The functions of steps, in f32.
use super::program::{Binary, Unary};
use crate::hopper::ptx;
use crate::pointwise::activation::normal_gate;
use cubecl::prelude::*;

const LOG2_E: f32 = core::f32::consts::LOG2_E;
const LN_2: f32 = core::f32::consts::LN_2;

#[cube]
pub(super) fn unary<N: Size>(x: Vector<f32, N>, #[comptime] f: Unary, #[comptime] n: usize) -> Vector<f32, N> {
    let mut out = Vector::<f32, N>::empty();
    #[unroll]
    for i in 0..n {
        out.insert(i, unary_of(x.extract(i), f));
    }
    out
}

#[cube]
pub(super) fn binary<N: Size>(
    a: Vector<f32, N>,
    b: Vector<f32, N>,
    #[comptime] f: Binary,
    #[comptime] n: usize,
) -> Vector<f32, N> {
    let mut out = Vector::<f32, N>::empty();
    #[unroll]
    for i in 0..n {
        out.insert(i, binary_of(a.extract(i), b.extract(i), f));
    }
    out
}

#[cube]
fn unary_of(x: f32, #[comptime] f: Unary) -> f32 {
    match f {
        Unary::Exp => ptx::exp2(x * LOG2_E),
        Unary::Log => ptx::log2(x) * LN_2,
        Unary::Log1p => x.log1p(),
        Unary::Sqrt => x.sqrt(),
        Unary::Recip => 1.0 / x,
        Unary::Tanh => x.tanh(),
        Unary::Erf => Erf::erf(x),
        Unary::Abs => max(x, -x),
        Unary::Neg => -x,
        Unary::Sin => x.sin(),
        Unary::Cos => x.cos(),
        Unary::Sigmoid => ptx::reciprocal(1.0 + ptx::exp2(-x * LOG2_E)),
        Unary::Relu => max(x, 0.0),
        Unary::Gelu => {
            let (phi, _) = normal_gate(x);
            x * phi
        }
    }
}

#[cube]
fn binary_of(a: f32, b: f32, #[comptime] f: Binary) -> f32 {
    match f {
        Binary::Add => a + b,
        Binary::Sub => a - b,
        Binary::Mul => a * b,
        Binary::Div => a / b,
        Binary::Max => max(a, b),
        Binary::Min => min(a, b),
        Binary::GeluGrad => {
            let (phi, bell) = normal_gate(a);
            b * (phi + a * bell)
        }
        Binary::ReluGrad => select(a > 0.0, b, 0.0),
        Binary::SigmoidGrad => b * a * (1.0 - a),
        Binary::Unless => select(b == 0.0, a, 0.0),
    }
}
