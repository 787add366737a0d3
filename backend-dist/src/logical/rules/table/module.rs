//! Operations of whole modules: convolutions, pooling, embeddings, attention, norms.

use super::Table;
use crate::logical::Placement::Replicate;
use crate::logical::rules::{Decision, attention, convolution, indexing, reduce};
use burn_ir::ModuleOperationIr;

impl<'a> Table<'a, '_> {
    pub(super) fn module(&self, op: &'a ModuleOperationIr) -> Option<Decision> {
        use ModuleOperationIr as Op;
        let kind = |groups, is_transposed| convolution::Kind { groups, is_transposed, ranks: self.axis.ranks };
        macro_rules! forward {
            ($op:ident, $is_transposed:literal) => {
                convolution::forward(
                    self.x(&$op.x),
                    self.x(&$op.weight),
                    $op.bias.as_ref().map(|bias| self.x(bias)),
                    kind($op.options.groups, $is_transposed),
                )
            };
        }
        macro_rules! gradient {
            ($rule:ident, $op:ident, $is_transposed:literal) => {
                convolution::$rule(
                    self.x(&$op.x),
                    self.x(&$op.weight),
                    self.x(&$op.output_grad),
                    kind($op.options.groups, $is_transposed),
                )
            };
        }
        macro_rules! bias_gradient {
            ($op:ident) => {
                convolution::bias_backward(self.x(&$op.x), self.x(&$op.bias), self.x(&$op.output_grad))
            };
        }
        macro_rules! per_channel {
            ($op:ident: $($field:ident),+; $outputs:expr) => {
                convolution::per_channel(&[$(self.x(&$op.$field)),+]).map(|decision| decision.with_outputs($outputs))
            };
        }
        match op {
            Op::Embedding(op) => indexing::embedding(self.x(&op.weights), self.x(&op.indices)),
            Op::EmbeddingBackward(op) => {
                indexing::embedding_backward(self.x(&op.weights), self.x(&op.out_grad), self.x(&op.indices))
            }
            Op::Conv1d(op) => forward!(op, false),
            Op::Conv2d(op) => forward!(op, false),
            Op::Conv3d(op) => forward!(op, false),
            Op::Conv1dXBackward(op) => gradient!(x_backward, op, false),
            Op::Conv2dXBackward(op) => gradient!(x_backward, op, false),
            Op::Conv3dXBackward(op) => gradient!(x_backward, op, false),
            Op::Conv1dWeightBackward(op) => gradient!(weight_backward, op, false),
            Op::Conv2dWeightBackward(op) => gradient!(weight_backward, op, false),
            Op::Conv3dWeightBackward(op) => gradient!(weight_backward, op, false),
            Op::Conv1dBiasBackward(op) => bias_gradient!(op),
            Op::Conv2dBiasBackward(op) => bias_gradient!(op),
            Op::Conv3dBiasBackward(op) => bias_gradient!(op),
            Op::ConvTranspose1d(op) => forward!(op, true),
            Op::ConvTranspose2d(op) => forward!(op, true),
            Op::ConvTranspose3d(op) => forward!(op, true),
            Op::ConvTranspose1dWeightBackward(op) => gradient!(weight_backward, op, true),
            Op::ConvTranspose2dWeightBackward(op) => gradient!(weight_backward, op, true),
            Op::ConvTranspose3dWeightBackward(op) => gradient!(weight_backward, op, true),
            Op::ConvTranspose1dBiasBackward(op) => bias_gradient!(op),
            Op::ConvTranspose2dBiasBackward(op) => bias_gradient!(op),
            Op::ConvTranspose3dBiasBackward(op) => bias_gradient!(op),
            Op::AvgPool1d(op) => convolution::linear_per_channel(self.x(&op.x)),
            Op::AvgPool2d(op) => convolution::linear_per_channel(self.x(&op.x)),
            Op::AvgPool3d(op) => convolution::linear_per_channel(self.x(&op.x)),
            Op::AvgPool1dBackward(op) => per_channel!(op: x, grad; 1),
            Op::AvgPool2dBackward(op) => per_channel!(op: x, grad; 1),
            Op::AvgPool3dBackward(op) => per_channel!(op: x, grad; 1),
            Op::AdaptiveAvgPool1d(op) => convolution::linear_per_channel(self.x(&op.x)),
            Op::AdaptiveAvgPool2d(op) => convolution::linear_per_channel(self.x(&op.x)),
            Op::AdaptiveAvgPool3d(op) => convolution::linear_per_channel(self.x(&op.x)),
            Op::AdaptiveAvgPool1dBackward(op) => per_channel!(op: x, grad; 1),
            Op::AdaptiveAvgPool2dBackward(op) => per_channel!(op: x, grad; 1),
            Op::AdaptiveAvgPool3dBackward(op) => per_channel!(op: x, grad; 1),
            Op::MaxPool1d(op) => per_channel!(op: x; 1),
            Op::MaxPool2d(op) => per_channel!(op: x; 1),
            Op::MaxPool3d(op) => per_channel!(op: x; 1),
            Op::MaxPool1dWithIndices(op) => per_channel!(op: x; 2),
            Op::MaxPool2dWithIndices(op) => per_channel!(op: x; 2),
            Op::MaxPool3dWithIndices(op) => per_channel!(op: x; 2),
            Op::MaxPool1dWithIndicesBackward(op) => per_channel!(op: x, indices, grad; 1),
            Op::MaxPool2dWithIndicesBackward(op) => per_channel!(op: x, indices, grad; 1),
            Op::MaxPool3dWithIndicesBackward(op) => per_channel!(op: x, indices, grad; 1),
            Op::Interpolate(op) => convolution::linear_per_channel(self.x(&op.x)),
            Op::InterpolateBackward(op) => per_channel!(op: x, grad; 1),
            Op::Attention(op) => {
                let mut inputs = self.all([&op.query, &op.key, &op.value]).to_vec();
                inputs.extend(op.mask.iter().chain(&op.attn_bias).map(|tensor| self.x(tensor)));
                attention::attention(&inputs, 1)
            }
            Op::AttentionWithLogsumexp(op) => attention::attention(&self.all([&op.query, &op.key, &op.value]), 2),
            Op::AttentionBackward(op) => attention::attention(
                &self.all([&op.query, &op.key, &op.value, &op.out, &op.logsumexp, &op.out_grad]),
                3,
            ),
            Op::BatchNorm(op) => {
                let [x, rest @ ..] = self.all([&op.x, &op.gamma, &op.beta, &op.mean, &op.variance]);
                convolution::normalized_per_channel(x, rest.len())
            }
            Op::LayerNorm(op) => {
                let last = op.input.shape.num_dims() - 1;
                let mut decision = reduce::other(self.x(&op.input), &[last])?;
                decision.inputs.resize(2 + usize::from(op.beta.is_some()), Replicate);
                Some(decision)
            }
            _ => None,
        }
    }
}
