//! What is in front of a linear layer, as a tensor that its own GEMM and that of its adapter read.

use backend_dist::ops::context::{attention_in_context, attention_over_context};
use backend_dist::ops::{Prologue, geglu, gelu, layer_norm, rms_norm, squared_relu, swiglu};
use burn::tensor::Tensor;

use crate::micro_batch::MicroBatch;

/// What a linear layer with an adapter has as its input: both GEMMs read it.
///
/// # Panics
/// If the prologue does not fit `x`.
pub(crate) fn apply<const D: usize>(prologue: Prologue, x: Tensor<D>, batch: &MicroBatch) -> Tensor<3> {
    fn shaped<const FROM: usize>(x: Tensor<FROM>) -> Tensor<3> {
        let shape = x.dims();
        x.reshape([shape[0], shape[1], shape[2..].iter().product()])
    }
    fn heads<const D: usize>(x: Tensor<D>) -> Tensor<4> {
        let shape: [usize; 4] = x.dims().as_slice().try_into().expect("attention has a dimension of heads");
        x.reshape(shape)
    }
    match prologue {
        Prologue::None => shaped(x),
        Prologue::RmsNorm { weight, rms } => shaped(rms_norm(x, weight, rms)),
        Prologue::LayerNorm { weight, bias, eps } => shaped(layer_norm(x, weight, bias, eps)),
        Prologue::SwiGlu => shaped(swiglu(x)),
        Prologue::Gelu(kind) => shaped(gelu(x, kind)),
        Prologue::GeGlu(kind) => shaped(geglu(x, kind)),
        Prologue::SquaredRelu => shaped(squared_relu(x)),
        Prologue::Attention(packed, options) => {
            shaped(attention_in_context(heads(x), packed, options, None, None, &batch.pass))
        }
        Prologue::AttentionInContext(packed, options, context, documents) => {
            shaped(attention_in_context(heads(x), packed, options, context.as_ref(), documents.as_ref(), &batch.pass))
        }
        Prologue::SeparateAttention { k, v, options, context, documents } => {
            shaped(attention_over_context(heads(x), k, v, options, context.as_ref(), documents.as_ref(), &batch.pass))
        }
    }
}
