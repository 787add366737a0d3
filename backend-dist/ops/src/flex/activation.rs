//! SwiGLU and GELU, one pass over memory each.

use burn::backend::Shape;
use burn::backend::flex::FlexTensor;

use super::{lanes::vectorized, output::filled_rows, real::Real};
use crate::options::GeluKind;

/// `√(2/π)`.
const SQRT_2_OVER_PI: f64 = 0.797_884_560_802_865_4;
/// Coefficient of the cube in the tanh approximation.
const CUBE: f64 = 0.044_715;

#[inline(always)]
fn sigmoid<E: Real>(x: E) -> E {
    E::ONE / (E::ONE + (-x).exp())
}

vectorized! {
    fn swiglu_rows<E>(x: &[E], out: &mut [E], f: usize) {
        for (x, out) in x.chunks_exact(2 * f).zip(out.chunks_exact_mut(f)) {
            let (gate, up) = x.split_at(f);
            for i in 0..f {
                out[i] = gate[i] * sigmoid(gate[i]) * up[i];
            }
        }
    }
}

vectorized! {
    fn swiglu_grad_rows<E>(x: &[E], grad: &[E], dx: &mut [E], f: usize) {
        for ((x, grad), dx) in x.chunks_exact(2 * f).zip(grad.chunks_exact(f)).zip(dx.chunks_exact_mut(2 * f)) {
            let (gate, up) = x.split_at(f);
            let (d_gate, d_up) = dx.split_at_mut(f);
            for i in 0..f {
                let s = sigmoid(gate[i]);
                d_gate[i] = grad[i] * up[i] * s * (E::ONE + gate[i] * (E::ONE - s));
                d_up[i] = grad[i] * gate[i] * s;
            }
        }
    }
}

/// `½ (1 + erf(x/√2))`.
#[inline(always)]
fn gate_erf<E: Real>(x: E) -> E {
    E::of(0.5) * (E::ONE + (x * E::of(std::f64::consts::FRAC_1_SQRT_2)).erf())
}

/// `½ (1 + tanh(u)) = σ(2u)`, which keeps its relative accuracy for very negative x.
#[inline(always)]
fn gate_tanh<E: Real>(x: E) -> E {
    sigmoid(x * (E::ONE + E::of(CUBE) * x * x) * E::of(2.0 * SQRT_2_OVER_PI))
}

vectorized! {
    fn gelu_erf<E>(x: &[E], out: &mut [E]) {
        for (&x, out) in x.iter().zip(out) {
            *out = x * gate_erf(x);
        }
    }
}

vectorized! {
    fn gelu_tanh<E>(x: &[E], out: &mut [E]) {
        for (&x, out) in x.iter().zip(out) {
            *out = x * gate_tanh(x);
        }
    }
}

vectorized! {
    fn gelu_erf_grad<E>(x: &[E], grad: &[E], dx: &mut [E]) {
        for ((&x, &grad), dx) in x.iter().zip(grad).zip(dx) {
            let bell = (E::of(-0.5) * x * x).exp() * E::of(0.5 * SQRT_2_OVER_PI);
            *dx = grad * (gate_erf(x) + x * bell);
        }
    }
}

vectorized! {
    fn gelu_tanh_grad<E>(x: &[E], grad: &[E], dx: &mut [E]) {
        for ((&x, &grad), dx) in x.iter().zip(grad).zip(dx) {
            let phi = gate_tanh(x);
            let inner = (E::ONE + E::of(3.0 * CUBE) * x * x) * E::of(2.0 * SQRT_2_OVER_PI);
            *dx = grad * (phi + x * phi * (E::ONE - phi) * inner);
        }
    }
}

/// Rough cost of one element in picoseconds.
const COST: usize = 600;

pub(super) fn swiglu<E: Real>(x: &FlexTensor) -> FlexTensor {
    let mut shape = x.layout().shape().to_vec();
    let last = shape.last_mut().expect("swiglu needs a dimension");
    *last /= 2;
    let f = *last;
    let x = E::slice(x);
    let data = filled_rows([x.len() / (2 * f).max(1), f], f * COST, |_, span, out| {
        swiglu_rows(&x[2 * span.start..2 * span.end], out, f);
    });
    E::tensor(data, Shape::from(shape))
}

pub(super) fn swiglu_grad<E: Real>(x: &FlexTensor, grad: &FlexTensor) -> FlexTensor {
    let shape = x.layout().shape().clone();
    let f = shape.to_vec().last().expect("swiglu needs a dimension") / 2;
    let (x, grad) = (E::slice(x), E::slice(grad));
    let data = filled_rows([x.len() / (2 * f).max(1), 2 * f], f * 2 * COST, |rows, span, dx| {
        swiglu_grad_rows(&x[span], &grad[rows.start * f..rows.end * f], dx, f);
    });
    E::tensor(data, shape)
}

pub(super) fn gelu<E: Real>(x: &FlexTensor, kind: GeluKind) -> FlexTensor {
    let shape = x.layout().shape().clone();
    let x = E::slice(x);
    let data = filled_rows([x.len(), 1], COST, |_, span, out| match kind {
        GeluKind::Erf => gelu_erf(&x[span], out),
        GeluKind::Tanh => gelu_tanh(&x[span], out),
    });
    E::tensor(data, shape)
}

pub(super) fn gelu_grad<E: Real>(x: &FlexTensor, grad: &FlexTensor, kind: GeluKind) -> FlexTensor {
    let shape = x.layout().shape().clone();
    let (x, grad) = (E::slice(x), E::slice(grad));
    let data = filled_rows([x.len(), 1], 2 * COST, |_, span, dx| match kind {
        GeluKind::Erf => gelu_erf_grad(&x[span.clone()], &grad[span], dx),
        GeluKind::Tanh => gelu_tanh_grad(&x[span.clone()], &grad[span], dx),
    });
    E::tensor(data, shape)
}
