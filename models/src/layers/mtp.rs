//! Multi-token prediction (DeepSeek-V3, <https://arxiv.org/abs/2412.19437>, section 2.2): what a module of it needs beside a
//! transformer block, and how its losses join those of the model.

use backend_dist::shard::Init;
use burn::module::Module;
use burn::tensor::{Int, Tensor};

use super::norm::{Norm, NormKind};
use super::replicated::ReplicatedLinear;
use crate::param::{BuildError, ParamBuilder};

/// From the hidden states of the module before and the embeddings of the tokens that it predicted, both normalised, to the
/// input of the module's block.
#[derive(Module, Debug)]
pub struct MtpProjection {
    enorm: Norm,
    hnorm: Norm,
    eh_proj: ReplicatedLinear,
}

impl MtpProjection {
    /// A projection under the global name `name`.
    ///
    /// # Errors
    /// See [`BuildError`].
    pub fn new(
        params: &mut ParamBuilder,
        name: &str,
        hidden: usize,
        norm_eps: f64,
        init: Init,
    ) -> Result<Self, BuildError> {
        let norm = |params: &mut ParamBuilder, part: &str| {
            Norm::new(params, &format!("{name}.{part}"), hidden, NormKind::Rms, norm_eps)
        };
        let (enorm, hnorm) = (norm(params, "enorm")?, norm(params, "hnorm")?);
        let outputs = [(&*format!("{name}.eh_proj"), hidden)];
        Ok(Self { enorm, hnorm, eh_proj: ReplicatedLinear::new(params, 2 * hidden, &outputs, init)? })
    }

    /// `eh_proj [enorm(embedded) | hnorm(hidden)]`, all `[s, b, hidden]` or the rank's parts of the sequence. The
    /// embedding comes first, as in the published weights (the report has it second).
    pub fn forward(&self, embedded: Tensor<3>, hidden: Tensor<3>) -> Tensor<3> {
        let both = vec![self.enorm.forward(embedded), self.hnorm.forward(hidden)];
        self.eh_proj.apply(Tensor::cat(both, 2))
    }
}

/// `tokens [b, s]`, each at `by` positions before its own; zeros where there is none.
pub fn ahead(tokens: Tensor<2, Int>, by: usize) -> Tensor<2, Int> {
    let [_, seq] = tokens.dims();
    if by == 0 {
        return tokens;
    }
    let by = by.min(seq);
    let zeros = tokens.clone().narrow(1, 0, by).zeros_like();
    if by == seq { zeros } else { Tensor::cat(vec![tokens.narrow(1, by, seq - by), zeros], 1) }
}

/// `losses [b, s]`, with a gradient that also goes to the losses of the modules, of which the first one's are at one
/// position before that of the same token in `losses`, the second one's at two, and so on: what multiplies the loss of a
/// token multiplies its losses in the modules too, times `weight`. That is Megatron-LM's rolled loss mask
/// (`megatron/core/transformer/multi_token_prediction.py`). What looks beyond the end of a sequence gets no gradient.
pub fn with_mtp_losses(losses: Tensor<2>, modules: Vec<Tensor<2>>, weight: f64) -> Tensor<2> {
    modules.into_iter().enumerate().fold(losses, |losses, (index, module)| {
        let ([_, seq], by) = (module.dims(), index + 1);
        if by >= seq {
            return losses;
        }
        let before = module.clone().narrow(1, 0, by).zeros_like();
        let aligned = Tensor::cat(vec![before, module.narrow(1, 0, seq - by)], 1).mul_scalar(weight);
        losses + (aligned.clone() - aligned.detach())
    })
}
