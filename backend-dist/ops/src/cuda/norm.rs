//! RMSNorm and LayerNorm. Gradients of weights and biases are f32: they are sums over all tokens, and accumulated in
//! f32.

use burn::backend::{Cube, DType, TensorMetadata};
use burn_cubecl::tensor::CubeTensor;
use cubecl::server::Handle;
use kernels_cubecl::pointwise::norm::{self, Affine, Gradients, NormShape};

use super::{Float, are_half, columns, empty, launched, packed, rows, work};
use crate::{
    kernels::{NormGrads, NormNeeds},
    options::Rms,
    plain,
    residual::kernels::{ResidualKernels, norm_grads_plus, norm_of_sum, reduced},
    step::Step,
};
use ranks::comm::Group;
use ranks::nccl::{connect, gpu_of, normed_sum};

pub fn rms_forward(x: Float, w: Float, norm: Rms) -> Float {
    if !are_half([&x, &w]) || !Affine::Rms(&w.handle).has_kernel(columns(&x)) {
        return plain::norm::rms_norm::<Cube>(x, w, norm);
    }
    forward(x, None, rms(&packed(w), norm), norm.eps)
}

pub fn rms_grads(x: Float, w: Float, grad: Float, norm: Rms, needs: NormNeeds) -> NormGrads<Cube> {
    if !are_half([&x, &w, &grad]) || !Affine::Rms(&w.handle).has_kernel(columns(&x)) {
        return plain::norm::rms_norm_grads::<Cube>(x, w, grad, norm, needs);
    }
    let w = packed(w);
    let dw = empty(&w, [columns(&x)], DType::F32);
    let dx = backward(x, rms(&w, norm), grad, None, &dw.handle, norm.eps);
    NormGrads { x: needs.x.then_some(dx), w: needs.w.then_some(dw), b: None }
}

pub fn layer_forward(x: Float, w: Float, b: Float, eps: f64) -> Float {
    if !are_half([&x, &w, &b]) || !Affine::Layer(&w.handle, &b.handle).has_kernel(columns(&x)) {
        return plain::norm::layer_norm::<Cube>(x, w, b, eps);
    }
    let (w, b) = (packed(w), packed(b));
    forward(x, None, Affine::Layer(&w.handle, &b.handle), eps)
}

pub fn layer_grads(x: Float, w: Float, grad: Float, eps: f64, needs: NormNeeds) -> NormGrads<Cube> {
    // The gradients do not need the bias.
    if !are_half([&x, &w, &grad]) || !Affine::Layer(&w.handle, &w.handle).has_kernel(columns(&x)) {
        return plain::norm::layer_norm_grads::<Cube>(x, w, grad, eps, needs);
    }
    let w = packed(w);
    let both = empty(&w, [2, columns(&x)], DType::F32);
    let dx = backward(x, Affine::Layer(&w.handle, &w.handle), grad, None, &both.handle, eps);
    let [dw, db] = two_rows(both);
    NormGrads { x: needs.x.then_some(dx), w: needs.w.then_some(dw), b: needs.b.then_some(db) }
}

impl ResidualKernels for Cube {
    fn norm_of_sum(x: Float, other: Float, norm: Step, params: &[Float]) -> [Float; 2] {
        let Some((packed_params, eps)) = suited(norm, params, &[&x, &other]) else {
            return norm_of_sum::<Self>(x, other, norm, params);
        };
        let _noted = work::memory("residual sum and norm", &x, |bytes| 4 * bytes);
        let (x, other) = (packed(x), packed(other));
        let sum = empty(&x, x.shape(), x.dtype());
        let y = forward(x, Some((&other.handle, &sum.handle)), affine(norm, &packed_params), eps);
        [sum, y]
    }

    fn norm_of_reduced(
        x: Float,
        partial: Float,
        norm: Step,
        params: &[Float],
        next: Option<&Float>,
        group: &Group,
    ) -> [Float; 2] {
        let link = if group.size() > 1 { connect(group, gpu_of(&x.device)) } else { None };
        if let (Step::RmsNorm(rms), Some(link)) = (norm, link)
            && let Some(made) = normed_sum(&partial, &x, &params[0], next, (rms.eps, rms.plus_one), (group, &link))
        {
            return made;
        }
        Self::norm_of_sum(x, reduced::<Self>(partial, group), norm, params)
    }

    fn norm_grads_plus(
        x: Float,
        norm: Step,
        params: &[Float],
        grad: Float,
        other: Float,
        needs: NormNeeds,
    ) -> NormGrads<Self> {
        let Some((packed_params, eps)) = suited(norm, params, &[&x, &grad, &other]) else {
            return norm_grads_plus::<Self>(x, norm, params, grad, other, needs);
        };
        let _noted = work::memory("norm gradient and residual sum", &x, |bytes| 4 * bytes);
        let sums = empty(&x, [packed_params.len(), columns(&x)], DType::F32);
        let other = packed(other);
        let dx = backward(x, affine(norm, &packed_params), grad, Some(&other.handle), &sums.handle, eps);
        let [w, b] = if packed_params.len() == 2 { two_rows(sums).map(Some) } else { [Some(one_row(sums)), None] };
        NormGrads { x: needs.x.then_some(dx), w: w.filter(|_| needs.w), b: b.filter(|_| needs.b) }
    }
}

/// The parameters of `norm` as its kernels read them and its epsilon, if there are kernels for it and for `inputs`.
fn suited(norm: Step, params: &[Float], rows: &[&Float]) -> Option<(Vec<Float>, f64)> {
    let (Step::RmsNorm(Rms { eps, .. }) | Step::LayerNorm(eps)) = norm else { return None };
    let half = params.iter().chain(rows.iter().copied()).all(|x| are_half([rows[0], x]));
    if !half || !affine(norm, params).has_kernel(columns(rows[0])) {
        return None;
    }
    Some((params.iter().cloned().map(packed).collect(), eps))
}

/// One parameter is RMSNorm's weight, two are LayerNorm's weight and bias.
fn affine(norm: Step, params: &[Float]) -> Affine<'_> {
    match (norm, params) {
        (Step::RmsNorm(norm), [w]) => rms(w, norm),
        (_, [w, b]) => Affine::Layer(&w.handle, &b.handle),
        _ => unreachable!("{norm:?} with {} parameters", params.len()),
    }
}

fn rms(w: &Float, norm: Rms) -> Affine<'_> {
    if norm.plus_one { Affine::RmsPlusOne(&w.handle) } else { Affine::Rms(&w.handle) }
}

/// `adds` are an addend and the output for the sum, which is then normalised.
fn forward(x: Float, adds: Option<(&Handle, &Handle)>, affine: Affine, eps: f64) -> Float {
    let x = packed(x);
    let (y, shape) = (empty(&x, x.shape(), x.dtype()), NormShape { rows: rows(&x), columns: columns(&x) });
    let done = by_half!(x, E => norm::forward::<E>(&x.client, &x.handle, adds, affine, &y.handle, eps as f32, shape));
    launched("norm", done);
    y
}

/// The gradient of `x`, with `other` added to it; those of the weights are written to `sums`.
fn backward(x: Float, affine: Affine, grad: Float, other: Option<&Handle>, sums: &Handle, eps: f64) -> Float {
    let (x, grad) = (packed(x), packed(grad));
    let (dx, shape) = (empty(&x, x.shape(), x.dtype()), NormShape { rows: rows(&x), columns: columns(&x) });
    let gradients = Gradients { x: &dx.handle, affine: sums };
    let done = by_half!(x, E => {
        norm::backward::<E>(&x.client, &x.handle, affine, &grad.handle, other, gradients, eps as f32, shape)
    });
    launched("norm gradient", done);
    dx
}

/// The contiguous `x [1, columns]` as `[columns]`.
fn one_row(x: CubeTensor) -> CubeTensor {
    let columns = columns(&x);
    CubeTensor::new_contiguous(x.client, x.device, [columns].into(), x.handle, DType::F32)
}

/// The matrix rows of `x [2, columns]`, contiguous f32.
pub(super) fn two_rows(x: CubeTensor) -> [CubeTensor; 2] {
    let columns = columns(&x);
    let bytes = (columns * size_of::<f32>()) as u64;
    [(0, bytes), (bytes, 0)].map(|(before, behind)| {
        let handle = x.handle.clone().offset_start(before).offset_end(behind);
        CubeTensor::new_contiguous(x.client.clone(), x.device.clone(), [columns].into(), handle, DType::F32)
    })
}
