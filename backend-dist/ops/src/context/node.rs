//! Attention in a context as an operation.

use burn::backend::TensorMetadata;

use super::algorithms::{ContextOptions, Saved, backward, forward};
use crate::{operation::operation, options::PackedHeads, plain::attention::unpack, saved_attention::CoreAttention};

operation! {
    pub(super) AttentionOver { context_options: ContextOptions, attention: CoreAttention }, 3,
    (Saved<B>, usize, ContextOptions),
    |[q, k, v], _, _| {
        let kv_heads = k.shape()[2];
        let (out, saved) = forward::<B>([q, k, v], &context_options, &attention);
        (out, Some((saved, kv_heads, context_options)))
    },
    |(saved, kv_heads, context_options), grad, parents| {
        parents.register::<B>(backward::<B>(saved, grad, kv_heads, &context_options));
    },
}

operation! {
    /// Of a packed projection.
    pub(super) AttentionIn { heads: PackedHeads, context_options: ContextOptions, attention: CoreAttention }, 1,
    (Saved<B>, usize, ContextOptions),
    |[qkv], _, _| {
        let (out, saved) = forward::<B>(unpack::<B>(qkv, heads), &context_options, &attention);
        (out, Some((saved, heads.kv_heads, context_options)))
    },
    |(saved, kv_heads, context_options), grad, parents| {
        // Also if no gradient is needed: the other ranks wait in the collectives.
        let parts = backward::<B>(saved, grad, kv_heads, &context_options);
        parents.register::<B>([B::float_cat(parts.into(), 2)]);
    },
}
