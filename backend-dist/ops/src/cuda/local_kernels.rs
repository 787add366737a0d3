//! Which kernel computes what, and what a profile notes of it.

use burn::backend::Cube;
use burn::tensor::Tensor;

use super::{
    Float, Int, accumulate, activation, attention, cross_entropy, dropout, embedding, linear, norm, reductions, rope,
    work,
};
use crate::dropout_mask::DropoutMask;
use crate::kernels::{LocalKernels, NormGrads, NormNeeds};
use crate::options::{AttentionOptions, GeluKind, PackedHeads, Rms, Rotation};

impl LocalKernels for Cube {
    fn sum_dim(x: Float, dim: usize) -> Float {
        reductions::sum_dim(x, dim)
    }

    fn mean_dim(x: Float, dim: usize) -> Float {
        reductions::mean_dim(x, dim)
    }

    fn matmul(a: Float, b: Float) -> Float {
        linear::matmul(a, b)
    }

    fn matmul_mixed(a: Float, b: Float, [alpha, beta]: [f64; 2], left: bool) -> Float {
        linear::matmul_mixed(a, b, gpu::cuda::lt::Mixed { alpha, beta, left })
    }

    fn linear_forward(x: Float, w: Float) -> Float {
        linear::forward(x, w)
    }

    fn linear_bias_forward(x: Float, w: Float, b: Float) -> Float {
        linear::bias_forward(x, w, b)
    }

    fn add_linear_forward(y: Float, x: Float, w: Float) -> Float {
        linear::add_forward(y, x, w)
    }

    fn bias_grad(grad: Float) -> Float {
        let _noted = work::memory("bias gradient", &grad, |bytes| bytes);
        linear::bias_grad(grad)
    }

    fn linear_input_grad(grad: Float, w: Float) -> Float {
        linear::input_grad(grad, w)
    }

    fn linear_add_input_grad(sum: Float, grad: Float, w: Float) -> Float {
        linear::add_input_grad(sum, grad, w)
    }

    fn linear_weight_grad(grad: Float, x: Float) -> Float {
        linear::weight_grad(grad, x)
    }

    fn in_place(view: &Tensor<1>) -> Option<Float> {
        accumulate::in_place(view)
    }

    fn accumulate(value: Float, sum: &Float, add: bool) {
        let _noted = work::memory("accumulation of a gradient", &value, |bytes| {
            bytes + bytes / value.dtype.size() * 4 * (1 + usize::from(add))
        });
        accumulate::accumulate(value, sum, add);
    }

    fn linear_accumulate_weight_grad(grad: Float, x: Float, sum: &Float, add: bool) {
        linear::accumulate_weight_grad(grad, x, sum, add);
    }

    fn rms_norm_forward(x: Float, w: Float, norm: Rms) -> Float {
        let _noted = work::memory("rms_norm", &x, |bytes| 2 * bytes);
        norm::rms_forward(x, w, norm)
    }

    fn rms_norm_grads(x: Float, w: Float, grad: Float, norm: Rms, needs: NormNeeds) -> NormGrads<Self> {
        let _noted = work::memory("rms_norm gradient", &x, |bytes| 3 * bytes);
        norm::rms_grads(x, w, grad, norm, needs)
    }

    fn layer_norm_forward(x: Float, w: Float, b: Float, eps: f64) -> Float {
        let _noted = work::memory("layer_norm", &x, |bytes| 2 * bytes);
        norm::layer_forward(x, w, b, eps)
    }

    fn layer_norm_grads(x: Float, w: Float, grad: Float, eps: f64, needs: NormNeeds) -> NormGrads<Self> {
        let _noted = work::memory("layer_norm gradient", &x, |bytes| 3 * bytes);
        norm::layer_grads(x, w, grad, eps, needs)
    }

    fn rope_apply(x: Float, cos: Float, sin: Float, heads: usize, rotation: Rotation) -> Float {
        rope::apply(x, cos, sin, heads, rotation)
    }

    fn swiglu_forward(x: Float) -> Float {
        let _noted = work::memory("swiglu", &x, |bytes| bytes + bytes / 2);
        activation::swiglu(x)
    }

    fn swiglu_grad(x: Float, grad: Float) -> Float {
        let _noted = work::memory("swiglu gradient", &x, |bytes| 2 * bytes + bytes / 2);
        activation::swiglu_grad(x, grad)
    }

    fn gelu_forward(x: Float, kind: GeluKind) -> Float {
        let _noted = work::memory("gelu", &x, |bytes| 2 * bytes);
        activation::gelu(x, kind)
    }

    fn gelu_grad(x: Float, grad: Float, kind: GeluKind) -> Float {
        let _noted = work::memory("gelu gradient", &x, |bytes| 3 * bytes);
        activation::gelu_grad(x, grad, kind)
    }

    fn geglu_forward(x: Float, kind: GeluKind) -> Float {
        let _noted = work::memory("geglu", &x, |bytes| bytes + bytes / 2);
        activation::geglu(x, kind)
    }

    fn geglu_grad(x: Float, grad: Float, kind: GeluKind) -> Float {
        let _noted = work::memory("geglu gradient", &x, |bytes| 2 * bytes + bytes / 2);
        activation::geglu_grad(x, grad, kind)
    }

    fn squared_relu_forward(x: Float) -> Float {
        let _noted = work::memory("squared relu", &x, |bytes| 2 * bytes);
        activation::squared_relu(x)
    }

    fn squared_relu_grad(x: Float, grad: Float) -> Float {
        let _noted = work::memory("squared relu gradient", &x, |bytes| 3 * bytes);
        activation::squared_relu_grad(x, grad)
    }

    fn attention_forward(q: Float, k: Float, v: Float, options: AttentionOptions) -> (Float, Float) {
        let _noted = work::attention(&q, k.meta.shape()[0], &options, false);
        attention::forward([q, k, v], options)
    }

    fn attention_grads(qkv: [Float; 3], result: [Float; 2], grad: Float, options: AttentionOptions) -> [Float; 3] {
        let _noted = work::attention(&qkv[0], qkv[1].meta.shape()[0], &options, true);
        attention::grads(qkv, result, grad, options)
    }

    fn attention_packed_forward(qkv: Float, heads: PackedHeads, options: AttentionOptions) -> (Float, Float) {
        let _noted = work::packed_attention(&qkv, heads, &options, false);
        attention::packed_forward(qkv, heads, options)
    }

    fn attention_packed_grad(
        qkv: Float,
        result: [Float; 2],
        grad: Float,
        heads: PackedHeads,
        options: AttentionOptions,
    ) -> Float {
        let _noted = work::packed_attention(&qkv, heads, &options, true);
        attention::packed_grad(qkv, result, grad, heads, options)
    }

    fn embedding_forward(w: Float, ids: Int, first_row: usize) -> Float {
        let _noted = work::rows("embedding", &w, &ids, 2 * w.dtype.size());
        embedding::forward(w, ids, first_row)
    }

    fn embedding_weight_grad(grad: Float, ids: Int, first_row: usize, rows: usize) -> Float {
        let _noted = work::rows("embedding gradient", &grad, &ids, 2 * grad.dtype.size());
        embedding::weight_grad(grad, ids, first_row, rows)
    }

    fn embedding_accumulate_weight_grad(grad: Float, ids: Int, first_row: usize, rows: usize, sum: &Float, add: bool) {
        let _noted = work::rows("embedding gradient", &grad, &ids, grad.dtype.size() + 4 * (1 + usize::from(add)));
        embedding::accumulate_weight_grad(grad, ids, [first_row, rows], sum, add);
    }

    fn vocab_maximum(logits: Float, valid: usize) -> Float {
        let _noted = work::memory("cross-entropy maximum", &logits, |bytes| bytes);
        cross_entropy::maximum(logits, valid)
    }

    fn vocab_sums(logits: Float, max: Float, labels: Int, first_row: usize, valid: usize) -> Float {
        let _noted = work::memory("cross-entropy sums", &logits, |bytes| bytes);
        cross_entropy::sums(logits, max, labels, first_row, valid)
    }

    fn vocab_statistics(logits: Float, labels: Int, first_row: usize, valid: usize) -> [Float; 2] {
        let _noted = work::memory("cross-entropy statistics", &logits, |bytes| bytes);
        cross_entropy::statistics(logits, labels, first_row, valid)
    }

    fn vocab_logits_grad(logits: Float, lse: Float, labels: Int, grad: Float, first_row: usize, valid: usize) -> Float {
        let _noted = work::memory("cross-entropy gradient", &logits, |bytes| 2 * bytes);
        cross_entropy::logits_grad(logits, [lse, grad], labels, first_row, valid)
    }

    fn dropout_apply(x: Float, p: f64, key: &DropoutMask) -> Float {
        let _noted = work::memory("dropout", &x, |bytes| 2 * bytes);
        dropout::apply(x, p, key)
    }
}
