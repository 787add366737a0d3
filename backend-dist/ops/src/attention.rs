//! Attention as a public operation: shape checks, then the extension.

use burn::tensor::Tensor;

use super::{
    local::{Attention, AttentionPacked},
    operation::apply,
    options::{AttentionDropout, AttentionOptions, PackedHeads},
    saved_attention::CoreAttention,
};

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
    apply(Attention { options, attention }, [q, k, v].map(Tensor::into_dispatch))
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
    apply(AttentionPacked { heads, options, attention }, [qkv.into_dispatch()])
}

/// # Panics
/// If the heads do not fit each other or the options.
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
