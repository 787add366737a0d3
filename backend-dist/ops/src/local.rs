//! The operations as Burn backend extensions: routing only.

use burn::backend::tensor::{FloatTensor, IntTensor};

use super::{
    dropout_mask::DropoutMask,
    kernels::LocalKernels,
    options::{AttentionOptions, GeluKind, PackedHeads, Rotation},
    plain,
    saved_attention::CoreAttention,
};
use crate::extension::operations;

operations! {
    /// One method per public operation; see the functions of [`ops`](super) for what they do.
    pub(super) trait LocalOps {
        fn op_rms_norm(x: FloatTensor<Self>, w: FloatTensor<Self>, eps: f64) -> FloatTensor<Self> {
            Self::rms_norm_forward(x, w, eps)
        }

        fn op_layer_norm(
            x: FloatTensor<Self>,
            w: FloatTensor<Self>,
            b: FloatTensor<Self>,
            eps: f64,
        ) -> FloatTensor<Self> {
            Self::layer_norm_forward(x, w, b, eps)
        }

        fn op_rope(
            x: FloatTensor<Self>,
            cos: FloatTensor<Self>,
            sin: FloatTensor<Self>,
            heads: usize,
        ) -> FloatTensor<Self> {
            Self::rope_apply(x, cos, sin, heads, Rotation::Forward)
        }

        fn op_swiglu(x: FloatTensor<Self>) -> FloatTensor<Self> {
            Self::swiglu_forward(x)
        }

        fn op_gelu(x: FloatTensor<Self>, kind: GeluKind) -> FloatTensor<Self> {
            Self::gelu_forward(x, kind)
        }

        fn op_geglu(x: FloatTensor<Self>, kind: GeluKind) -> FloatTensor<Self> {
            Self::geglu_forward(x, kind)
        }

        fn op_squared_relu(x: FloatTensor<Self>) -> FloatTensor<Self> {
            Self::squared_relu_forward(x)
        }

        fn op_softcap(x: FloatTensor<Self>, cap: f64) -> FloatTensor<Self> {
            plain::activation::softcap::<Self>(x, cap)
        }

        fn op_attention(
            q: FloatTensor<Self>,
            k: FloatTensor<Self>,
            v: FloatTensor<Self>,
            options: AttentionOptions,
            attention: CoreAttention,
        ) -> FloatTensor<Self> {
            attention.run(|| Self::attention_forward(q, k, v, options)).0
        }

        fn op_attention_packed(
            qkv: FloatTensor<Self>,
            heads: PackedHeads,
            options: AttentionOptions,
            attention: CoreAttention,
        ) -> FloatTensor<Self> {
            attention.run(|| Self::attention_packed_forward(qkv, heads, options)).0
        }

        fn op_embedding(w: FloatTensor<Self>, ids: IntTensor<Self>, first_row: usize) -> FloatTensor<Self> {
            Self::embedding_forward(w, ids, first_row)
        }

        fn op_dropout(x: FloatTensor<Self>, p: f64, key: DropoutMask) -> FloatTensor<Self> {
            Self::dropout_apply(x, p, &key)
        }

        fn op_add_bias(x: FloatTensor<Self>, b: FloatTensor<Self>) -> FloatTensor<Self> {
            plain::linear::add_bias::<Self>(x, b)
        }

        fn op_add_linear(y: FloatTensor<Self>, x: FloatTensor<Self>, w: FloatTensor<Self>) -> FloatTensor<Self> {
            Self::add_linear_forward(y, x, w)
        }
    }
}
