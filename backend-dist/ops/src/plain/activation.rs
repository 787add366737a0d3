//! SwiGLU, GELU, GeGLU and squared ReLU, and the soft cap of scores and logits.

use burn::backend::{Backend, tensor::FloatTensor};

use super::{add, dims, last, narrow, scale, sigmoid, widen};
use crate::dtype::cast;
use crate::kernels::LocalKernels;
use crate::options::GeluKind;

/// `√(2/π)`.
const SQRT_2_OVER_PI: f64 = 0.797_884_560_802_865_4;
/// Coefficient of the cube in the tanh approximation.
const CUBE: f64 = 0.044_715;

/// `[gate | up]` split.
fn halves<B: Backend>(x: FloatTensor<B>) -> [FloatTensor<B>; 2] {
    let (dim, n) = (dims(&x).len() - 1, last(&x));
    [narrow::<B>(x.clone(), dim, 0, n / 2), narrow::<B>(x, dim, n / 2, n)]
}

pub fn swiglu<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let (x, dtype) = widen::<B>(x);
    let [gate, up] = halves::<B>(x);
    let silu = B::float_mul(sigmoid::<B>(gate.clone()), gate);
    cast::<B>(B::float_mul(silu, up), dtype)
}

/// `silu'(z) = σ(z) (1 + z (1 - σ(z)))`.
pub fn swiglu_grad<B: Backend>(x: FloatTensor<B>, grad: FloatTensor<B>) -> FloatTensor<B> {
    let dim = dims(&x).len() - 1;
    let (x, dtype) = widen::<B>(x);
    let grad = widen::<B>(grad).0;
    let [gate, up] = halves::<B>(x);
    let sigma = sigmoid::<B>(gate.clone());
    let slope = add::<B>(B::float_mul(gate.clone(), add::<B>(B::float_neg(sigma.clone()), 1.0)), 1.0);
    let slope = B::float_mul(sigma.clone(), slope);
    let d_gate = B::float_mul(B::float_mul(grad.clone(), up), slope);
    let d_up = B::float_mul(grad, B::float_mul(gate, sigma));
    cast::<B>(B::float_cat(vec![d_gate, d_up], dim), dtype)
}

/// The factor `½ (1 + erf(x/√2))` or its tanh approximation.
fn gate<B: Backend>(x: FloatTensor<B>, kind: GeluKind) -> FloatTensor<B> {
    let s = match kind {
        GeluKind::Erf => B::float_erf(scale::<B>(x, std::f64::consts::FRAC_1_SQRT_2)),
        GeluKind::Tanh => {
            let square = B::float_mul(x.clone(), x.clone());
            let inner = B::float_mul(x, add::<B>(scale::<B>(square, CUBE), 1.0));
            B::float_tanh(scale::<B>(inner, SQRT_2_OVER_PI))
        }
    };
    scale::<B>(add::<B>(s, 1.0), 0.5)
}

pub fn gelu<B: Backend>(x: FloatTensor<B>, kind: GeluKind) -> FloatTensor<B> {
    let (x, dtype) = widen::<B>(x);
    cast::<B>(B::float_mul(gate::<B>(x.clone(), kind), x), dtype)
}

/// With `Φ` the factor of the forward pass: `Φ + x Φ'`, `Φ' = ½ √(2/π) exp(-x²/2)` for erf and
/// `2 Φ (1 - Φ) √(2/π) (1 + 3·0.044715 x²)` for tanh.
pub fn gelu_grad<B: Backend>(x: FloatTensor<B>, grad: FloatTensor<B>, kind: GeluKind) -> FloatTensor<B> {
    let (x, dtype) = widen::<B>(x);
    let grad = widen::<B>(grad).0;
    let phi = gate::<B>(x.clone(), kind);
    let square = B::float_mul(x.clone(), x.clone());
    let slope = match kind {
        GeluKind::Erf => scale::<B>(B::float_exp(scale::<B>(square, -0.5)), 0.5 * SQRT_2_OVER_PI),
        GeluKind::Tanh => {
            let inner = scale::<B>(add::<B>(scale::<B>(square, 3.0 * CUBE), 1.0), 2.0 * SQRT_2_OVER_PI);
            let bell = B::float_mul(phi.clone(), add::<B>(B::float_neg(phi.clone()), 1.0));
            B::float_mul(bell, inner)
        }
    };
    let total = B::float_add(phi, B::float_mul(x, slope));
    cast::<B>(B::float_mul(grad, total), dtype)
}

/// `gelu(gate) up`.
pub fn geglu<B: LocalKernels>(x: FloatTensor<B>, kind: GeluKind) -> FloatTensor<B> {
    let (x, dtype) = widen::<B>(x);
    let [gate, up] = halves::<B>(x);
    cast::<B>(B::float_mul(B::gelu_forward(gate, kind), up), dtype)
}

/// Gradient of [`geglu`].
pub fn geglu_grad<B: LocalKernels>(x: FloatTensor<B>, grad: FloatTensor<B>, kind: GeluKind) -> FloatTensor<B> {
    let dim = dims(&x).len() - 1;
    let (x, dtype) = widen::<B>(x);
    let grad = widen::<B>(grad).0;
    let [gate, up] = halves::<B>(x);
    let d_gate = B::gelu_grad(gate.clone(), B::float_mul(grad.clone(), up), kind);
    let d_up = B::float_mul(grad, B::gelu_forward(gate, kind));
    cast::<B>(B::float_cat(vec![d_gate, d_up], dim), dtype)
}

/// `max(x, 0)²`.
pub fn squared_relu<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let (x, dtype) = widen::<B>(x);
    let positive = B::relu(x);
    cast::<B>(B::float_mul(positive.clone(), positive), dtype)
}

/// `2 max(x, 0)` times the gradient.
pub fn squared_relu_grad<B: Backend>(x: FloatTensor<B>, grad: FloatTensor<B>) -> FloatTensor<B> {
    let (x, dtype) = widen::<B>(x);
    let slope = scale::<B>(B::relu(x), 2.0);
    cast::<B>(B::float_mul(widen::<B>(grad).0, slope), dtype)
}

/// `cap tanh(x / cap)`.
pub fn softcap<B: Backend>(x: FloatTensor<B>, cap: f64) -> FloatTensor<B> {
    scale::<B>(B::float_tanh(scale::<B>(x, cap.recip())), cap)
}

/// Gradient of [`softcap`] from its output: `grad (1 - (capped / cap)²)`.
pub fn softcap_grad<B: Backend>(capped: FloatTensor<B>, grad: FloatTensor<B>, cap: f64) -> FloatTensor<B> {
    let share = scale::<B>(capped, cap.recip());
    let slope = add::<B>(B::float_neg(B::float_mul(share.clone(), share)), 1.0);
    B::float_mul(grad, slope)
}
