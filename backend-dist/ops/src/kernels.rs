//! Forward and gradient kernels of one backend.

use burn::backend::{
    Backend, TensorMetadata,
    tensor::{FloatTensor as Float, IntTensor as Int},
};
use burn::tensor::Tensor;

use super::{
    dropout_mask::DropoutMask,
    options::{AttentionOptions, GeluKind, PackedHeads, Rms, Rotation},
    plain,
};

/// Which gradients of a normalisation are needed.
#[derive(Clone, Copy, Debug)]
pub struct NormNeeds {
    /// Of the input.
    pub x: bool,
    /// Of the weight.
    pub w: bool,
    /// Of the bias.
    pub b: bool,
}

/// Gradients of a normalisation, each present if it was needed.
#[derive(Debug)]
pub struct NormGrads<B: Backend> {
    /// Of the input, in its shape.
    pub x: Option<Float<B>>,
    /// Of the weight, `[hidden]`.
    pub w: Option<Float<B>>,
    /// Of the bias, `[hidden]`.
    pub b: Option<Float<B>>,
}

/// Forward and gradients of the local operations on a backend without autodiff.
///
/// Shapes are checked by the public functions of [`ops`](super); `grad` has the shape of the operation's output. The
/// default bodies are the formulas in Burn's primitives.
pub trait LocalKernels: Backend {
    /// Sum over dimension `dim`, which becomes 1: in a fixed order, at least in f32.
    fn sum_dim(x: Float<Self>, dim: usize) -> Float<Self> {
        Self::float_sum_dim(x, dim)
    }

    /// [`sum_dim`](Self::sum_dim) divided by the size of the dimension.
    fn mean_dim(x: Float<Self>, dim: usize) -> Float<Self> {
        Self::float_mean_dim(x, dim)
    }

    /// `a · b` of the last two dimensions, `[.., m, k] · [.., k, n]`; the others are equal.
    fn matmul(a: Float<Self>, b: Float<Self>) -> Float<Self> {
        Self::float_matmul(a, b)
    }

    /// `alpha · a · b + beta · c`, where `c` is `a`, or `b` unless `left`, and has the result's shape.
    fn matmul_mixed(a: Float<Self>, b: Float<Self>, [alpha, beta]: [f64; 2], left: bool) -> Float<Self> {
        let added = Self::float_mul_scalar(if left { a.clone() } else { b.clone() }, beta.into());
        Self::float_add(added, Self::float_mul_scalar(Self::matmul(a, b), alpha.into()))
    }

    /// `x · wᵀ`, `x [.., in]`, `w [out, in]`.
    fn linear_forward(x: Float<Self>, w: Float<Self>) -> Float<Self> {
        plain::linear::forward::<Self>(x, w)
    }

    /// `x · wᵀ + b`, `b [out]`.
    fn linear_bias_forward(x: Float<Self>, w: Float<Self>, b: Float<Self>) -> Float<Self> {
        plain::linear::add_bias::<Self>(Self::linear_forward(x, w), b)
    }

    /// `y + x · wᵀ`, `y [.., out]`.
    fn add_linear_forward(y: Float<Self>, x: Float<Self>, w: Float<Self>) -> Float<Self> {
        Self::float_add(y, Self::linear_forward(x, w))
    }

    /// Gradient of a bias: the sum of `grad [.., out]` over all leading dimensions, `[out]`.
    fn bias_grad(grad: Float<Self>) -> Float<Self> {
        plain::linear::bias_grad::<Self>(grad)
    }

    /// Gradient of [`linear_forward`](Self::linear_forward) in `x`: `grad · w`.
    fn linear_input_grad(grad: Float<Self>, w: Float<Self>) -> Float<Self> {
        plain::linear::input_grad::<Self>(grad, w)
    }

    /// `sum + grad · w`, `sum [.., in]`.
    fn linear_add_input_grad(sum: Float<Self>, grad: Float<Self>, w: Float<Self>) -> Float<Self> {
        Self::float_add(sum, Self::linear_input_grad(grad, w))
    }

    /// Gradient of [`linear_forward`](Self::linear_forward) in `w`: `gradᵀ · x` over all leading dimensions.
    fn linear_weight_grad(grad: Float<Self>, x: Float<Self>) -> Float<Self> {
        plain::linear::weight_grad::<Self>(grad, x)
    }

    /// The tensor as one that [`accumulate`](Self::accumulate) writes in place; `None` on backends without such
    /// tensors. Only this result may be passed as `sum` to the methods that add in place.
    fn in_place(_view: &Tensor<1>) -> Option<Float<Self>> {
        None
    }

    /// Writes `value` to the f32 elements of `sum`, or adds it to them.
    fn accumulate(_value: Float<Self>, sum: &Float<Self>, _add: bool) {
        panic!("{:?} does not write in place", sum.device())
    }

    /// Writes [`linear_weight_grad`](Self::linear_weight_grad) to the f32 elements of `sum`, or adds it to them.
    fn linear_accumulate_weight_grad(grad: Float<Self>, x: Float<Self>, sum: &Float<Self>, add: bool) {
        Self::accumulate(Self::linear_weight_grad(grad, x), sum, add);
    }

    /// Writes [`embedding_weight_grad`](Self::embedding_weight_grad) to the f32 elements of `sum`, or adds it to them.
    fn embedding_accumulate_weight_grad(
        grad: Float<Self>,
        ids: Int<Self>,
        first_row: usize,
        rows: usize,
        sum: &Float<Self>,
        add: bool,
    ) {
        Self::accumulate(Self::embedding_weight_grad(grad, ids, first_row, rows), sum, add);
    }

    /// `w x / √(mean(x²) + eps)` over the last dimension, or with `1 + w`.
    fn rms_norm_forward(x: Float<Self>, w: Float<Self>, norm: Rms) -> Float<Self> {
        plain::norm::rms_norm::<Self>(x, w, norm)
    }

    /// Gradients of [`rms_norm_forward`](Self::rms_norm_forward); `needs.b` is ignored.
    fn rms_norm_grads(
        x: Float<Self>,
        w: Float<Self>,
        grad: Float<Self>,
        norm: Rms,
        needs: NormNeeds,
    ) -> NormGrads<Self> {
        plain::norm::rms_norm_grads::<Self>(x, w, grad, norm, needs)
    }

    /// `w (x - mean(x)) / √(var(x) + eps) + b` over the last dimension, with the biased variance.
    fn layer_norm_forward(x: Float<Self>, w: Float<Self>, b: Float<Self>, eps: f64) -> Float<Self> {
        plain::norm::layer_norm::<Self>(x, w, b, eps)
    }

    /// Gradients of [`layer_norm_forward`](Self::layer_norm_forward).
    fn layer_norm_grads(
        x: Float<Self>,
        w: Float<Self>,
        grad: Float<Self>,
        eps: f64,
        needs: NormNeeds,
    ) -> NormGrads<Self> {
        plain::norm::layer_norm_grads::<Self>(x, w, grad, eps, needs)
    }

    /// Rotates the first `heads` heads of `x [s, b, h, d]` by the angles of `cos, sin [s, rot/2]` (rotate-half over the
    /// first `rot` dimensions); other heads and dimensions are copied. Its own gradient with the other [`Rotation`].
    fn rope_apply(x: Float<Self>, cos: Float<Self>, sin: Float<Self>, heads: usize, rotation: Rotation) -> Float<Self> {
        plain::rope::apply::<Self>(x, cos, sin, heads, rotation)
    }

    /// `silu(gate) up` of `x = [gate | up]` in the last dimension.
    fn swiglu_forward(x: Float<Self>) -> Float<Self> {
        plain::activation::swiglu::<Self>(x)
    }

    /// Gradient of [`swiglu_forward`](Self::swiglu_forward).
    fn swiglu_grad(x: Float<Self>, grad: Float<Self>) -> Float<Self> {
        plain::activation::swiglu_grad::<Self>(x, grad)
    }

    /// GELU, element by element.
    fn gelu_forward(x: Float<Self>, kind: GeluKind) -> Float<Self> {
        plain::activation::gelu::<Self>(x, kind)
    }

    /// Gradient of [`gelu_forward`](Self::gelu_forward).
    fn gelu_grad(x: Float<Self>, grad: Float<Self>, kind: GeluKind) -> Float<Self> {
        plain::activation::gelu_grad::<Self>(x, grad, kind)
    }

    /// `gelu(gate) up` of `x = [gate | up]` in the last dimension.
    fn geglu_forward(x: Float<Self>, kind: GeluKind) -> Float<Self> {
        plain::activation::geglu::<Self>(x, kind)
    }

    /// Gradient of [`geglu_forward`](Self::geglu_forward).
    fn geglu_grad(x: Float<Self>, grad: Float<Self>, kind: GeluKind) -> Float<Self> {
        plain::activation::geglu_grad::<Self>(x, grad, kind)
    }

    /// `max(x, 0)²`, element by element.
    fn squared_relu_forward(x: Float<Self>) -> Float<Self> {
        plain::activation::squared_relu::<Self>(x)
    }

    /// Gradient of [`squared_relu_forward`](Self::squared_relu_forward).
    fn squared_relu_grad(x: Float<Self>, grad: Float<Self>) -> Float<Self> {
        plain::activation::squared_relu_grad::<Self>(x, grad)
    }

    /// Softmax attention: the output `[s, b, hq, d]` and the log-sum-exp of the scaled scores, `[b, hq, s]` or as the
    /// backend's own gradient kernels read it.
    fn attention_forward(
        q: Float<Self>,
        k: Float<Self>,
        v: Float<Self>,
        options: AttentionOptions,
    ) -> (Float<Self>, Float<Self>) {
        plain::attention::forward::<Self>(q, k, v, options)
    }

    /// Gradients of [`attention_forward`](Self::attention_forward) in q, k and v, from its `[output, log-sum-exp]`.
    fn attention_grads(
        qkv: [Float<Self>; 3],
        result: [Float<Self>; 2],
        grad: Float<Self>,
        options: AttentionOptions,
    ) -> [Float<Self>; 3] {
        plain::attention::grads::<Self>(qkv, result, grad, options)
    }

    /// [`attention_forward`](Self::attention_forward) on `qkv [s, b, hq + 2 hkv, d] = [q | k | v]`.
    fn attention_packed_forward(
        qkv: Float<Self>,
        heads: PackedHeads,
        options: AttentionOptions,
    ) -> (Float<Self>, Float<Self>) {
        let [q, k, v] = plain::attention::unpack::<Self>(qkv, heads);
        Self::attention_forward(q, k, v, options)
    }

    /// Gradient of [`attention_packed_forward`](Self::attention_packed_forward) in `qkv`.
    fn attention_packed_grad(
        qkv: Float<Self>,
        result: [Float<Self>; 2],
        grad: Float<Self>,
        heads: PackedHeads,
        options: AttentionOptions,
    ) -> Float<Self> {
        let qkv = plain::attention::unpack::<Self>(qkv, heads);
        Self::float_cat(Self::attention_grads(qkv, result, grad, options).into(), 2)
    }

    /// Rows `ids - first_row` of `w [rows, hidden]`, zero for an id outside; output `[ids.., hidden]`.
    fn embedding_forward(w: Float<Self>, ids: Int<Self>, first_row: usize) -> Float<Self> {
        plain::embedding::forward::<Self>(w, ids, first_row)
    }

    /// Gradient of [`embedding_forward`](Self::embedding_forward) in `w`, `[rows, hidden]`.
    fn embedding_weight_grad(grad: Float<Self>, ids: Int<Self>, first_row: usize, rows: usize) -> Float<Self> {
        plain::embedding::weight_grad::<Self>(grad, ids, first_row, rows)
    }

    /// Maximum over the first `valid` columns of `logits [s, b, v]`, `[s, b]`, at least in f32.
    fn vocab_maximum(logits: Float<Self>, valid: usize) -> Float<Self> {
        plain::cross_entropy::maximum::<Self>(logits, valid)
    }

    /// `Σ exp(logit - max)` over the first `valid` columns and the label's `logit - max` (0 if it has another column),
    /// stacked as `[2, s, b]`, in the type of `max`. Column 0 has id `first_row`.
    fn vocab_sums(
        logits: Float<Self>,
        max: Float<Self>,
        labels: Int<Self>,
        first_row: usize,
        valid: usize,
    ) -> Float<Self> {
        plain::cross_entropy::sums::<Self>(logits, max, labels, first_row, valid)
    }

    /// [`vocab_maximum`](Self::vocab_maximum) and [`vocab_sums`](Self::vocab_sums) with it, if this rank has the whole
    /// vocabulary.
    fn vocab_statistics(logits: Float<Self>, labels: Int<Self>, first_row: usize, valid: usize) -> [Float<Self>; 2] {
        let max = Self::vocab_maximum(logits.clone(), valid);
        [max.clone(), Self::vocab_sums(logits, max, labels, first_row, valid)]
    }

    /// Gradient of the cross-entropy in `logits`, from the log-sum-exp over the whole vocabulary and the gradient of
    /// the loss, both `[s, b]`.
    fn vocab_logits_grad(
        logits: Float<Self>,
        lse: Float<Self>,
        labels: Int<Self>,
        grad: Float<Self>,
        first_row: usize,
        valid: usize,
    ) -> Float<Self> {
        plain::cross_entropy::logits_grad::<Self>(logits, lse, labels, grad, first_row, valid)
    }

    /// Zero with probability `p` by the mask of `key`, else divided by `1 - p`. Its own gradient.
    fn dropout_apply(x: Float<Self>, p: f64, key: &DropoutMask) -> Float<Self> {
        plain::dropout::apply::<Self>(x, p, key)
    }
}
