//! Kernels of the CPU backend: plain loops over slices, compiled for the instruction sets found at run time, on several
//! threads where the work is large enough.

/// Runs `$body` with `$E` the element type of `$dtype`; half precision has been widened before.
macro_rules! by_real {
    ($dtype:expr, $E:ident => $body:expr) => {
        match $dtype {
            DType::F64 => {
                type $E = f64;
                $body
            }
            _ => {
                type $E = f32;
                $body
            }
        }
    };
}

/// `$body` with `$E` the type that an operation on `$x` computes in and all operands dense and of it, in the type of `$x`.
macro_rules! in_real {
    ($x:ident $(, $other:ident)*; $E:ident => $body:expr) => {{
        let (dtype, inner) = ($x.dtype(), compute_type($x.dtype()));
        let $x = dense($x, inner);
        $(let $other = dense($other, inner);)*
        cast(by_real!(inner, $E => $body), dtype)
    }};
}

mod activation;
mod attention;
mod blockwise;
mod context;
mod cross_entropy;
mod dropout;
mod embedding;
mod fp8;
mod fp8_blocks;
mod fp8_grid;
mod fp8_groups;
mod gemm;
mod heads;
mod lanes;
mod linear;
mod moe;
mod norm;
mod output;
mod parallel;
mod real;
mod rope;
mod softmax;

use burn::backend::flex::FlexTensor;
use burn::backend::{DType, Flex, FloatDType, ops::FloatTensorOps};

use super::{
    dropout_mask::DropoutMask,
    kernels::{LocalKernels, NormGrads, NormNeeds},
    options::{AttentionOptions, GeluKind, PackedHeads, Rms, Rotation, ScoreOffset},
};

/// The type an operation on `dtype` computes in.
fn compute_type(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

fn cast(x: FlexTensor, dtype: DType) -> FlexTensor {
    if x.dtype() == dtype { x } else { Flex::float_cast(x, FloatDType::from(dtype)) }
}

/// Dense in memory (an offset is fine) and of type `dtype`.
fn dense(x: FlexTensor, dtype: DType) -> FlexTensor {
    let x = cast(x, dtype);
    if x.is_contiguous() { x } else { x.to_contiguous() }
}

impl LocalKernels for Flex {
    fn linear_forward(x: FlexTensor, w: FlexTensor) -> FlexTensor {
        let (dtype, inner) = (x.dtype(), compute_type(x.dtype()));
        let (x, w) = (cast(x, inner), cast(w, inner));
        cast(by_real!(inner, E => linear::forward::<E>(x, w)), dtype)
    }

    fn linear_input_grad(grad: FlexTensor, w: FlexTensor) -> FlexTensor {
        let (dtype, inner) = (grad.dtype(), compute_type(grad.dtype()));
        let (grad, w) = (cast(grad, inner), cast(w, inner));
        cast(by_real!(inner, E => linear::input_grad::<E>(grad, w)), dtype)
    }

    fn linear_weight_grad(grad: FlexTensor, x: FlexTensor) -> FlexTensor {
        let (dtype, inner) = (grad.dtype(), compute_type(grad.dtype()));
        let (grad, x) = (cast(grad, inner), cast(x, inner));
        cast(by_real!(inner, E => linear::weight_grad::<E>(grad, x)), dtype)
    }

    fn rms_norm_forward(x: FlexTensor, w: FlexTensor, norm: Rms) -> FlexTensor {
        in_real!(x, w; E => norm::rms_forward::<E>(&x, &w, norm))
    }

    fn rms_norm_grads(x: FlexTensor, w: FlexTensor, grad: FlexTensor, norm: Rms, needs: NormNeeds) -> NormGrads<Self> {
        let (dtype, inner) = (x.dtype(), compute_type(x.dtype()));
        let (x, w, grad) = (dense(x, inner), dense(w, inner), dense(grad, inner));
        by_real!(inner, E => norm::grads::<E>(&x, &w, &grad, norm, NormNeeds { b: false, ..needs }, false)).cast(dtype)
    }

    fn layer_norm_forward(x: FlexTensor, w: FlexTensor, b: FlexTensor, eps: f64) -> FlexTensor {
        in_real!(x, w, b; E => norm::layer_forward::<E>(&x, &w, &b, eps))
    }

    fn layer_norm_grads(x: FlexTensor, w: FlexTensor, grad: FlexTensor, eps: f64, needs: NormNeeds) -> NormGrads<Self> {
        let (dtype, inner) = (x.dtype(), compute_type(x.dtype()));
        let (x, w, grad) = (dense(x, inner), dense(w, inner), dense(grad, inner));
        by_real!(inner, E => norm::grads::<E>(&x, &w, &grad, eps.into(), needs, true)).cast(dtype)
    }

    fn rope_apply(x: FlexTensor, cos: FlexTensor, sin: FlexTensor, heads: usize, rotation: Rotation) -> FlexTensor {
        let (dtype, inner) = (x.dtype(), compute_type(x.dtype()));
        let (x, cos, sin) = (cast(x, inner), dense(cos, inner), dense(sin, inner));
        cast(by_real!(inner, E => rope::apply::<E>(&x, &cos, &sin, heads, rotation)), dtype)
    }

    fn swiglu_forward(x: FlexTensor) -> FlexTensor {
        in_real!(x; E => activation::swiglu::<E>(&x))
    }

    fn swiglu_grad(x: FlexTensor, grad: FlexTensor) -> FlexTensor {
        in_real!(x, grad; E => activation::swiglu_grad::<E>(&x, &grad))
    }

    fn gelu_forward(x: FlexTensor, kind: GeluKind) -> FlexTensor {
        in_real!(x; E => activation::gelu::<E>(&x, kind))
    }

    fn gelu_grad(x: FlexTensor, grad: FlexTensor, kind: GeluKind) -> FlexTensor {
        in_real!(x, grad; E => activation::gelu_grad::<E>(&x, &grad, kind))
    }

    fn attention_forward(
        q: FlexTensor,
        k: FlexTensor,
        v: FlexTensor,
        options: AttentionOptions,
    ) -> (FlexTensor, FlexTensor) {
        let place = ScoreOffset::whole(q.layout().shape()[0], k.layout().shape()[0]);
        context::forward([q, k, v], options, place)
    }

    fn attention_grads(
        qkv: [FlexTensor; 3],
        result: [FlexTensor; 2],
        grad: FlexTensor,
        options: AttentionOptions,
    ) -> [FlexTensor; 3] {
        let place = ScoreOffset::whole(qkv[0].layout().shape()[0], qkv[1].layout().shape()[0]);
        context::grads(qkv, result, grad, options, place)
    }

    fn attention_packed_forward(
        qkv: FlexTensor,
        heads: PackedHeads,
        options: AttentionOptions,
    ) -> (FlexTensor, FlexTensor) {
        let [q, k, v] = super::plain::attention::unpack::<Flex>(qkv, heads);
        Self::attention_forward(q, k, v, options)
    }

    fn attention_packed_grad(
        qkv: FlexTensor,
        [out, lse]: [FlexTensor; 2],
        grad: FlexTensor,
        heads: PackedHeads,
        options: AttentionOptions,
    ) -> FlexTensor {
        let (dtype, inner) = (qkv.dtype(), compute_type(qkv.dtype()));
        let [q, k, v] = super::plain::attention::unpack::<Flex>(cast(qkv, inner), heads);
        let (out, grad) = (dense(out, inner), dense(grad, inner));
        cast(by_real!(inner, E => attention::packed_grad::<E>([&q, &k, &v], &out, &lse, &grad, options)), dtype)
    }

    fn embedding_forward(w: FlexTensor, ids: FlexTensor, first_row: usize) -> FlexTensor {
        in_real!(w; E => embedding::forward::<E>(&w, &ids, first_row))
    }

    fn embedding_weight_grad(grad: FlexTensor, ids: FlexTensor, first_row: usize, rows: usize) -> FlexTensor {
        in_real!(grad; E => embedding::weight_grad::<E>(&grad, &ids, first_row, rows))
    }

    fn vocab_maximum(logits: FlexTensor, valid: usize) -> FlexTensor {
        let inner = compute_type(logits.dtype());
        let logits = dense(logits, inner);
        by_real!(inner, E => cross_entropy::maximum::<E>(&logits, valid))
    }

    fn vocab_sums(
        logits: FlexTensor,
        max: FlexTensor,
        labels: FlexTensor,
        first_row: usize,
        valid: usize,
    ) -> FlexTensor {
        let inner = compute_type(logits.dtype());
        let (logits, max) = (dense(logits, inner), dense(max, inner));
        by_real!(inner, E => cross_entropy::sums::<E>(&logits, &max, &labels, first_row, valid))
    }

    fn vocab_logits_grad(
        logits: FlexTensor,
        lse: FlexTensor,
        labels: FlexTensor,
        grad: FlexTensor,
        first_row: usize,
        valid: usize,
    ) -> FlexTensor {
        let (dtype, inner) = (logits.dtype(), compute_type(logits.dtype()));
        let [logits, lse, grad] = [logits, lse, grad].map(|x| dense(x, inner));
        let out = by_real!(inner, E => {
            cross_entropy::logits_grad::<E>(&logits, &lse, &labels, &grad, first_row, valid)
        });
        cast(out, dtype)
    }

    fn dropout_apply(x: FlexTensor, p: f64, key: &DropoutMask) -> FlexTensor {
        in_real!(x; E => dropout::apply::<E>(&x, p, key))
    }
}

impl NormGrads<Flex> {
    fn cast(self, dtype: DType) -> Self {
        let cast = |x: Option<FlexTensor>| x.map(|x| cast(x, dtype));
        Self { x: cast(self.x), w: cast(self.w), b: cast(self.b) }
    }
}
