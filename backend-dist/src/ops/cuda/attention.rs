//! Flash attention. Queries, keys and values are read where they lie, also within a packed projection, and their
//! gradients are written there. The log-sum-exp has the layout of the kernels, `[b, hq, padded queries]` in f32.

use burn::backend::{Cube, DType, FloatDType, TensorMetadata, ops::FloatTensorOps};
use burn_cubecl::kernel::copy_contiguous;
use burn_cubecl::tensor::CubeTensor;
use kernels_cubecl::attention::{self as kernels, AttentionShape, Extras, Gradients, Saved, Tensor4};

use super::{Float, are_bf16, empty, is_aligned, launched};
use crate::ops::{
    options::{AttentionOptions, PackedHeads},
    plain,
};

/// Strides of the kernels' tensors are multiples of this: 16 bytes.
const VECTOR: usize = 8;

pub fn forward(qkv: [Float; 3], options: AttentionOptions) -> (Float, Float) {
    let Some(shape) = shape_of(&qkv, options) else {
        let [q, k, v] = qkv;
        return plain::attention::forward::<Cube>(q, k, v, options);
    };
    let [q, k, v] = qkv.map(readable);
    run(&q, &shape, options, [&q, &k, &v].map(whole))
}

pub fn grads(qkv: [Float; 3], result: [Float; 2], grad: Float, options: AttentionOptions) -> [Float; 3] {
    let Some(shape) = shape_of(&qkv, options) else {
        return plain::attention::grads::<Cube>(qkv, result, grad, options);
    };
    let [q, k, v] = qkv.map(readable);
    let gradients = [&q, &k, &v].map(|x| empty(x, x.shape(), x.dtype()));
    run_back(&shape, options, [&q, &k, &v].map(whole), result, grad, gradients.each_ref().map(whole));
    gradients
}

pub fn packed_forward(qkv: Float, heads: PackedHeads, options: AttentionOptions) -> (Float, Float) {
    let Some(shape) = packed_shape(&qkv, heads, options) else {
        let [q, k, v] = plain::attention::unpack::<Cube>(qkv, heads);
        return plain::attention::forward::<Cube>(q, k, v, options);
    };
    let qkv = readable(qkv);
    run(&qkv, &shape, options, parts(&qkv, heads))
}

pub fn packed_grad(
    qkv: Float,
    result: [Float; 2],
    grad: Float,
    heads: PackedHeads,
    options: AttentionOptions,
) -> Float {
    let Some(shape) = packed_shape(&qkv, heads, options) else {
        let qkv = plain::attention::unpack::<Cube>(qkv, heads);
        return Cube::float_cat(plain::attention::grads::<Cube>(qkv, result, grad, options).into(), 2);
    };
    let qkv = readable(qkv);
    let gradient = empty(&qkv, qkv.shape(), qkv.dtype());
    run_back(&shape, options, parts(&qkv, heads), result, grad, parts(&gradient, heads));
    gradient
}

/// The problem if there is a kernel for it. Forward and backward pass must answer alike: the log-sum-exp has another
/// layout without the kernels.
fn problem(
    x: &CubeTensor,
    [queries, keys]: [usize; 2],
    [heads, kv_heads]: [usize; 2],
    options: AttentionOptions,
) -> Option<AttentionShape> {
    let dims = x.meta.shape();
    let shape = AttentionShape {
        batch: dims[1],
        heads,
        kv_heads,
        queries,
        keys,
        head_dim: dims[3],
        value_dim: dims[3],
        causal: options.causal,
        window: options.window,
    };
    let plain = options.scale <= 0.0 || shape.check(&x.client, &Extras::default()).is_err();
    (!plain).then_some(shape)
}

fn shape_of([q, k, v]: &[Float; 3], options: AttentionOptions) -> Option<AttentionShape> {
    let (from, to) = (q.meta.shape(), k.meta.shape());
    are_bf16([q, k, v]).then(|| problem(q, [from[0], to[0]], [from[2], to[2]], options)).flatten()
}

fn packed_shape(qkv: &Float, heads: PackedHeads, options: AttentionOptions) -> Option<AttentionShape> {
    let seq = qkv.meta.shape()[0];
    are_bf16([qkv]).then(|| problem(qkv, [seq, seq], [heads.heads, heads.kv_heads], options)).flatten()
}

/// `x [s, b, h, d]` as the copy engine can follow it: as it is, else a copy.
fn readable(x: CubeTensor) -> CubeTensor {
    let (shape, strides) = (x.meta.shape(), x.meta.strides());
    let outer = (0..3).all(|i| shape[i] == 1 || (strides[i] > 0 && strides[i].is_multiple_of(VECTOR)));
    if outer && strides[3] == 1 && is_aligned(&x) { x } else { copy_contiguous(x) }
}

/// Heads `first..first + heads` of `x [s, b, h, d]`.
fn some_heads(x: &CubeTensor, first: usize, heads: usize) -> Tensor4 {
    let (shape, strides) = (x.meta.shape(), x.meta.strides());
    // The stride of a dimension of size one may be anything.
    let stride = |i: usize| if shape[i] == 1 { shape[3] } else { strides[i] };
    let skipped = first * stride(2) * x.dtype().size();
    Tensor4 {
        handle: x.handle.clone().offset_start(skipped as u64),
        shape: [shape[0], shape[1], heads, shape[3]],
        strides: [stride(0), stride(1), stride(2)],
    }
}

fn whole(x: &CubeTensor) -> Tensor4 {
    some_heads(x, 0, x.meta.shape()[2])
}

/// `[q | k | v]` where they lie.
fn parts(qkv: &CubeTensor, heads: PackedHeads) -> [Tensor4; 3] {
    let (q, kv) = (heads.heads, heads.kv_heads);
    [(0, q), (q, kv), (q + kv, kv)].map(|(first, count)| some_heads(qkv, first, count))
}

/// Output `[s, b, hq, d]` and log-sum-exp; `like` is on the device.
fn run(
    like: &CubeTensor,
    shape: &AttentionShape,
    options: AttentionOptions,
    [q, k, v]: [Tensor4; 3],
) -> (Float, Float) {
    let out = empty(like, shape.out_shape(), DType::BF16);
    let lse = empty(like, [shape.batch, shape.heads, shape.padded_queries()], DType::F32);
    let scale = options.scale as f32;
    launched(
        "attention",
        kernels::forward(&like.client, shape, scale, &Extras::default(), (&q, &k, &v), &whole(&out), &lse.handle),
    );
    (out, lse)
}

fn run_back(
    shape: &AttentionShape,
    options: AttentionOptions,
    [q, k, v]: [Tensor4; 3],
    [out, lse]: [Float; 2],
    grad: Float,
    [dq, dk, dv]: [Tensor4; 3],
) {
    let grad = if grad.dtype() == DType::BF16 { grad } else { Cube::float_cast(grad, FloatDType::BF16) };
    let (out, grad) = (readable(out), readable(grad));
    let saved = Saved { q: &q, k: &k, v: &v, out: &whole(&out), lse: &lse.handle };
    let gradients = Gradients { q: &dq, k: &dk, v: &dv };
    let scale = options.scale as f32;
    launched(
        "attention gradient",
        kernels::backward(&out.client, shape, scale, &Extras::default(), saved, &whole(&grad), gradients),
    );
}
