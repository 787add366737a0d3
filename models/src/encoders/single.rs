//! What is computed in at least single precision, as in transformers: half precision has 8 or 11 bits for a sum.

use burn::tensor::{Bool, DType, Tensor, activation};

/// Half precision in fp32; the rest as it is.
pub fn at_least_single<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    match x.dtype() {
        DType::F16 | DType::BF16 => x.cast(DType::F32),
        _ => x,
    }
}

/// Attention weights of `scores [batch, heads, queries, keys]`, in their type. Where `hidden` is true, nothing is seen; a
/// query that sees nothing weighs all keys alike, as in transformers.
pub fn attention_weights(scores: Tensor<4>, hidden: Option<Tensor<4, Bool>>) -> Tensor<4> {
    let dtype = scores.dtype();
    let scores = at_least_single(scores);
    let scores = match hidden {
        Some(hidden) => scores.mask_fill(hidden, f32::MIN),
        None => scores,
    };
    activation::softmax(scores, 3).cast(dtype)
}
