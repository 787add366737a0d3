//! The public operations: shape checks, then the extension.

use burn::backend::Dispatch;
use burn::tensor::{Int, Tensor};

use super::{
    dropout_mask::DropoutMask,
    extras::Extras,
    fused::{FusedOps, LinearConfig},
    gemm::LinearCollectives,
    local::LocalOps,
    options::{AttentionDropout, AttentionOptions, GeluKind, PackedHeads},
    pass::PassContext,
    prologue::Step,
    saved_attention::CoreAttention,
};

/// `x · wᵀ` for `x [.., in]` and `w [out, in]`; output `[.., out]`.
///
/// # Panics
///
/// If the last dimension of `x` is not `in`.
pub fn linear<const D: usize>(x: Tensor<D>, w: Tensor<2>) -> Tensor<D> {
    let (input, [out, inner]) = (x.dims()[D - 1], w.dims());
    assert_eq!(input, inner, "linear: input has {input} features, weight [{out}, {inner}] takes {inner}");
    let (step, collectives) = (Step::None, LinearCollectives::default());
    let config = LinearConfig {
        step,
        context: None,
        collectives,
        fp8: None,
        recompute: false,
        bias: false,
        joint: None,
        pass: PassContext::default(),
    };
    Tensor::from_dispatch(<Dispatch as FusedOps>::op_linear(x.into_dispatch(), Extras::None, w.into_dispatch(), config))
}

/// `x + b` for `x [.., n]` and `b [n]`.
///
/// # Panics
///
/// If `b` does not fit `x`.
pub fn add_bias<const D: usize>(x: Tensor<D>, b: Tensor<1>) -> Tensor<D> {
    check_affine("add_bias: bias", x.dims()[D - 1], &b);
    Tensor::from_dispatch(<Dispatch as LocalOps>::op_add_bias(x.into_dispatch(), b.into_dispatch()))
}

/// `w x / √(mean(x²) + eps)` over the last dimension; `w` has its size.
///
/// # Panics
///
/// If `w` does not fit `x`.
pub fn rms_norm<const D: usize>(x: Tensor<D>, w: Tensor<1>, eps: f64) -> Tensor<D> {
    check_affine("rms_norm: weight", x.dims()[D - 1], &w);
    Tensor::from_dispatch(<Dispatch as LocalOps>::op_rms_norm(x.into_dispatch(), w.into_dispatch(), eps))
}

/// `w (x - mean(x)) / √(var(x) + eps) + b` over the last dimension, with the biased variance.
///
/// # Panics
///
/// If `w` or `b` does not fit `x`.
pub fn layer_norm<const D: usize>(x: Tensor<D>, w: Tensor<1>, b: Tensor<1>, eps: f64) -> Tensor<D> {
    check_affine("layer_norm: weight", x.dims()[D - 1], &w);
    check_affine("layer_norm: bias", x.dims()[D - 1], &b);
    let (x, w, b) = (x.into_dispatch(), w.into_dispatch(), b.into_dispatch());
    Tensor::from_dispatch(<Dispatch as LocalOps>::op_layer_norm(x, w, b, eps))
}

/// Rotary position embedding of `x [s, b, h, d]`: row `i` of `cos, sin [s, rot/2]` belongs to sequence position `i` of
/// `x`. Dimension `j < rot/2` is rotated with dimension `j + rot/2` ("rotate half", as Hugging Face's Llama);
/// dimensions from `rot` on are copied. No gradient flows into `cos` and `sin`.
///
/// # Panics
///
/// If `cos` or `sin` does not fit `x`.
pub fn rope(x: Tensor<4>, cos: Tensor<2>, sin: Tensor<2>) -> Tensor<4> {
    let heads = x.dims()[2];
    rope_packed(x, cos, sin, heads)
}

/// [`rope`] on the first `heads` heads only, the others are copied: rotates the queries and keys of a packed
/// `[q | k | v]` projection in one step.
///
/// # Panics
///
/// If `cos` or `sin` does not fit `x`, or `x` has fewer than `heads` heads.
pub fn rope_packed(x: Tensor<4>, cos: Tensor<2>, sin: Tensor<2>, heads: usize) -> Tensor<4> {
    let [s, _, h, d] = x.dims();
    assert!(heads <= h, "rope: {heads} heads to rotate, input has {h}");
    assert_eq!(cos.dims(), sin.dims(), "rope: cos and sin differ in shape");
    let [rows, half] = cos.dims();
    assert!(rows == s && 2 * half <= d, "rope: angles are [{rows}, {half}], input has sequence {s}, head size {d}");
    let (x, cos, sin) = (x.into_dispatch(), cos.into_dispatch(), sin.into_dispatch());
    Tensor::from_dispatch(<Dispatch as LocalOps>::op_rope(x, cos, sin, heads))
}

/// `silu(gate) up` of `x [.., 2f] = [gate | up]`; output `[.., f]`.
///
/// # Panics
///
/// If the last dimension is odd.
pub fn swiglu<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let size = x.dims()[D - 1];
    assert!(size.is_multiple_of(2), "swiglu: last dimension {size} is not [gate | up]");
    Tensor::from_dispatch(<Dispatch as LocalOps>::op_swiglu(x.into_dispatch()))
}

/// GELU, element by element.
pub fn gelu<const D: usize>(x: Tensor<D>, kind: GeluKind) -> Tensor<D> {
    Tensor::from_dispatch(<Dispatch as LocalOps>::op_gelu(x.into_dispatch(), kind))
}

/// `gelu(gate) up` of `x [.., 2f] = [gate | up]`; output `[.., f]`.
///
/// # Panics
///
/// If the last dimension is odd.
pub fn geglu<const D: usize>(x: Tensor<D>, kind: GeluKind) -> Tensor<D> {
    let size = x.dims()[D - 1];
    assert!(size.is_multiple_of(2), "geglu: last dimension {size} is not [gate | up]");
    let half = size / 2;
    gelu(x.clone().narrow(D - 1, 0, half), kind) * x.narrow(D - 1, half, half)
}

/// `cap tanh(x / cap)`, element by element.
pub fn softcap<const D: usize>(x: Tensor<D>, cap: f64) -> Tensor<D> {
    x.div_scalar(cap).tanh().mul_scalar(cap)
}

/// Softmax attention of `q [s, b, hq, d]` over `k [t, b, hkv, d]` and `v [t, b, hkv, dv]`; output `[s, b, hq, dv]`.
/// Query head `h` uses key/value head `h / (hq/hkv)`. The score matrix is never held for all heads at once.
///
/// `t` may be larger than `s`: the queries then have the last `s` of the keys' `t` positions, as in a decoder with a KV
/// cache.
///
/// # Panics
///
/// If the shapes do not fit, `hq` is not a multiple of `hkv`, the window is empty, or the dropout has fewer heads.
pub fn attention(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, options: AttentionOptions) -> Tensor<4> {
    attention_of_pass(q, k, v, options, CoreAttention::Compute)
}

/// [`attention`] in a pass that may save or replay it.
pub(super) fn attention_of_pass(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    options: AttentionOptions,
    attention: CoreAttention,
) -> Tensor<4> {
    let ([s, b, hq, d], keys, values) = (q.dims(), k.dims(), v.dims());
    assert_eq!(keys[..3], values[..3], "attention: k is {keys:?}, v is {values:?}; only the last may differ");
    assert!(s <= keys[0] && [b, d] == [keys[1], keys[3]], "attention: q is {:?}, k is {keys:?}", q.dims());
    check_heads(hq, keys[2], options);
    let (q, k, v) = (q.into_dispatch(), k.into_dispatch(), v.into_dispatch());
    Tensor::from_dispatch(<Dispatch as LocalOps>::op_attention(q, k, v, options, attention))
}

/// [`attention`] on a packed projection `qkv [s, b, hq + 2 hkv, d] = [q | k | v]`: q, k and v are read in place, and
/// the backward pass writes one packed gradient.
///
/// # Panics
///
/// If `heads` does not fit `qkv`, `hq` is not a multiple of `hkv`, the window is empty, or the dropout has fewer heads.
pub fn attention_packed(qkv: Tensor<4>, heads: PackedHeads, options: AttentionOptions) -> Tensor<4> {
    attention_packed_of_pass(qkv, heads, options, CoreAttention::Compute)
}

/// [`attention_packed`] in a pass that may save or replay it.
pub(super) fn attention_packed_of_pass(
    qkv: Tensor<4>,
    heads: PackedHeads,
    options: AttentionOptions,
    attention: CoreAttention,
) -> Tensor<4> {
    assert_eq!(qkv.dims()[2], heads.total(), "attention_packed: {heads:?} do not make up the input's heads");
    check_heads(heads.heads, heads.kv_heads, options);
    let qkv = qkv.into_dispatch();
    Tensor::from_dispatch(<Dispatch as LocalOps>::op_attention_packed(qkv, heads, options, attention))
}

/// Rows of the embedding matrix `w [rows, hidden]` by id; output `[a, b, hidden]` for `ids [a, b]`. Row 0 of `w` has id
/// `first_row`. An id outside `first_row..first_row + rows` gives zeros, so that the sum over the vocabulary-parallel
/// shards is the embedding.
pub fn embedding(w: Tensor<2>, ids: Tensor<2, Int>, first_row: usize) -> Tensor<3> {
    Tensor::from_dispatch(<Dispatch as LocalOps>::op_embedding(w.into_dispatch(), ids.into_dispatch(), first_row))
}

/// Sets elements to zero with probability `p` and divides the others by `1 - p`. The mask is a function of the key's
/// seed and the element's position in the global tensor only, see [`DropoutMask`].
///
/// # Panics
///
/// If `p` is not in `0..1`, or `x` does not lie within the key's global tensor.
pub fn dropout<const D: usize>(x: Tensor<D>, p: f64, key: DropoutMask) -> Tensor<D> {
    assert!((0.0..1.0).contains(&p), "dropout: probability {p} is not in 0..1");
    if p == 0.0 {
        return x;
    }
    Tensor::from_dispatch(<Dispatch as LocalOps>::op_dropout(x.into_dispatch(), p, key))
}

fn check_affine(what: &str, hidden: usize, w: &Tensor<1>) {
    let [size] = w.dims();
    assert_eq!(size, hidden, "{what} has {size} elements, the input's last dimension is {hidden}");
}

pub(super) fn check_heads(hq: usize, hkv: usize, options: AttentionOptions) {
    assert!(
        hkv > 0 && hq.is_multiple_of(hkv),
        "attention: {hq} query heads are not a multiple of {hkv} key/value heads"
    );
    assert!(options.window != Some(0), "attention: a window of 0 hides every key");
    if let Some(AttentionDropout { p, first_head, heads, .. }) = options.dropout {
        assert!((0.0..1.0).contains(&p), "attention: dropout of {p} is not in 0..1");
        assert!(first_head + hq <= heads, "attention: heads {first_head}..{} of {heads} to drop from", first_head + hq);
    }
}
