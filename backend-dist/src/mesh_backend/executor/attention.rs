//! Burn's attention operation by FlashAttention: no scores in memory, and grouped queries read the heads of keys and
//! values in place.

use super::{Executor, Float};
use crate::mesh_backend::inner::Inner;
use burn::tensor::ops::{AttentionModuleOptions, CausalAlignment};
use burn::tensor::{DType, FloatDType, Slice};
use burn_ir::{AttentionBackwardOpIr, AttentionOptionsIr, ModuleOperationIr, OperationIr, TensorIr, TensorStatus};
use ops::AttentionOptions;

impl<B: Inner> Executor<B> {
    /// Runs attention without a mask or a bias. Burn's own has its softmax in f32 for f64 too, and with its
    /// gradients on a GPU a Llama in f32 trained to NaN.
    pub(super) fn attention(&mut self, op: &OperationIr) -> bool {
        use ModuleOperationIr as Op;
        match op {
            OperationIr::Module(Op::Attention(op)) if op.mask.is_none() && op.attn_bias.is_none() => {
                self.attend([&op.query, &op.key, &op.value], &op.options, &op.out, None)
            }
            OperationIr::Module(Op::AttentionWithLogsumexp(op)) => {
                self.attend([&op.query, &op.key, &op.value], &op.options, &op.out, Some(&op.logsumexp))
            }
            OperationIr::Module(Op::AttentionBackward(op)) => self.attention_gradients(op),
            _ => false,
        }
    }

    fn attend(
        &mut self,
        qkv: [&TensorIr; 3],
        options: &AttentionOptionsIr,
        out: &TensorIr,
        logsumexp: Option<&TensorIr>,
    ) -> bool {
        let Some((dtype, options)) = self.attention_kernel(qkv, options) else { return false };
        let [q, k, v] = self.by_position(qkv, dtype);
        self.count("attention");
        let (y, saved) = B::attention_forward(q, k, v, options);
        self.insert(out.id, by_head::<B>(y), self.half == Some(dtype));
        if let Some(logsumexp) = logsumexp {
            // What kernels save has rows that are padded.
            let rows: Vec<Slice> = logsumexp.shape.iter().map(|size| Slice::from(0..*size)).collect();
            let visible = B::float_cast(B::float_slice(saved.clone(), &rows), FloatDType::F32);
            self.insert(logsumexp.id, visible, false);
            self.logsumexps.insert(logsumexp.id, saved);
        }
        true
    }

    fn attention_gradients(&mut self, op: &AttentionBackwardOpIr) -> bool {
        let qkv = [&op.query, &op.key, &op.value];
        let Some((dtype, options)) = self.attention_kernel(qkv, &op.options) else { return false };
        // It is not there if it was placed elsewhere since.
        let Some(saved) = self.logsumexps.get(&op.logsumexp.id).cloned() else { return false };
        let qkv = self.by_position(qkv, dtype);
        let [out, grad] = self.by_position([&op.out, &op.out_grad], dtype);
        if op.logsumexp.status == TensorStatus::ReadWrite {
            self.drop_tensor(op.logsumexp.id);
        }
        self.count("attention gradient");
        let gradients = B::attention_grads(qkv, [out, saved], grad, options);
        for (x, gradient) in [&op.query_grad, &op.key_grad, &op.value_grad].into_iter().zip(gradients) {
            self.insert(x.id, by_head::<B>(gradient), self.half == Some(dtype));
        }
        true
    }

    /// The type that attention is computed in, and its options, if it is computed here.
    fn attention_kernel(
        &self,
        [q, k, v]: [&TensorIr; 3],
        options: &AttentionOptionsIr,
    ) -> Option<(DType, AttentionOptions)> {
        let dtype = self.half.filter(|_| q.dtype == self.limits.dtype).unwrap_or(q.dtype);
        let AttentionModuleOptions { scale, softcap, is_causal, causal_alignment } = options.clone().into();
        let is_at_end = causal_alignment == CausalAlignment::BottomRight || q.shape[2] == k.shape[2];
        let is_here = matches!(dtype, DType::BF16 | DType::F16 | DType::F32 | DType::F64)
            && [k, v].iter().all(|x| x.dtype == q.dtype)
            && (!is_causal || is_at_end);
        let usual = AttentionOptions::causal(q.shape[3]);
        let scale = scale.unwrap_or(usual.scale);
        is_here.then_some((dtype, AttentionOptions { scale, softcap, causal: is_causal, ..usual }))
    }

    /// `[b, h, s, d]` in `dtype` as views `[s, b, h, d]`.
    fn by_position<const N: usize>(&mut self, tensors: [&TensorIr; N], dtype: DType) -> [Float<B>; N] {
        tensors.iter().for_each(|x| self.want(x.id, dtype));
        tensors.map(|x| by_position::<B>(self.in_type(x, dtype)))
    }
}

/// `[b, h, s, d]` as a view `[s, b, h, d]`.
pub(super) fn by_position<B: Inner>(x: Float<B>) -> Float<B> {
    B::float_permute(x, &[2, 0, 1, 3])
}

/// `[s, b, h, d]` as a view `[b, h, s, d]`.
pub(super) fn by_head<B: Inner>(x: Float<B>) -> Float<B> {
    B::float_permute(x, &[1, 2, 0, 3])
}
