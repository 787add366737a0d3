//! Attention of some queries of a sequence over some of its keys.

use burn::backend::flex::FlexTensor;
use burn::backend::{DType, Flex};

use super::{attention, cast, compute_type, dense};
use crate::context::kernels::ContextKernels;
use crate::options::{AttentionOptions, ScoreOffset};

pub(super) fn forward(qkv: [FlexTensor; 3], options: AttentionOptions, place: ScoreOffset) -> (FlexTensor, FlexTensor) {
    let (dtype, inner) = (qkv[0].dtype(), compute_type(qkv[0].dtype()));
    let [q, k, v] = qkv.map(|x| cast(x, inner));
    let (out, lse) = by_real!(inner, E => attention::forward::<E>([&q, &k, &v], options, place));
    (cast(out, dtype), lse)
}

pub(super) fn grads(
    qkv: [FlexTensor; 3],
    [out, lse]: [FlexTensor; 2],
    grad: FlexTensor,
    options: AttentionOptions,
    place: ScoreOffset,
) -> [FlexTensor; 3] {
    let (dtype, inner) = (qkv[0].dtype(), compute_type(qkv[0].dtype()));
    let [q, k, v] = qkv.map(|x| cast(x, inner));
    let (out, lse, grad) = (dense(out, inner), dense(lse, inner), dense(grad, inner));
    let grads = by_real!(inner, E => attention::grads::<E>([&q, &k, &v], &out, &lse, &grad, options, place));
    grads.map(|x| cast(x, dtype))
}

impl ContextKernels for Flex {
    fn attention_at(qkv: [FlexTensor; 3], options: AttentionOptions, place: ScoreOffset) -> [FlexTensor; 2] {
        forward(qkv, options, place).into()
    }

    fn attention_grads_at(
        qkv: [FlexTensor; 3],
        result: [FlexTensor; 2],
        grad: FlexTensor,
        options: AttentionOptions,
        place: ScoreOffset,
    ) -> [FlexTensor; 3] {
        grads(qkv, result, grad, options, place)
    }
}
