//! A block with latent attention: norm, attention, residual; norm, MLP or experts, residual.

use backend_dist::ops::Residual;
use burn::module::Module;
use burn::tensor::Tensor;

use crate::layers::paged::{PagedKvCache, Step};
use crate::layers::{Angles, FeedForward, Ffn, LatentAttention, MlaConfig, Norm, NormKind};
use crate::micro_batch::MicroBatch;
use crate::param::{BuildError, ParamBuilder};

/// What a block is made of.
#[derive(Clone, Copy, Debug)]
pub(super) struct LatentBlockConfig {
    pub attention: MlaConfig,
    pub mlp: Ffn,
    pub norm_eps: f64,
}

/// One layer of a DeepSeek-V3. Activations between its parts are `[s, b, hidden]`, under sequence parallelism
/// `[s/tp, b, hidden]`.
#[derive(Module, Debug)]
pub struct LatentBlock {
    input_layernorm: Norm,
    attention: LatentAttention,
    post_attention_layernorm: Norm,
    mlp: FeedForward,
}

impl LatentBlock {
    pub(super) fn new(params: &mut ParamBuilder, name: &str, config: &LatentBlockConfig) -> Result<Self, BuildError> {
        let norm = |params: &mut ParamBuilder, part: &str| {
            Norm::new(params, &format!("{name}.{part}"), config.attention.hidden, NormKind::Rms, config.norm_eps)
        };
        Ok(Self {
            input_layernorm: norm(params, "input_layernorm")?,
            attention: LatentAttention::new(params, &format!("{name}.attention"), &config.attention)?,
            post_attention_layernorm: norm(params, "post_attention_layernorm")?,
            mlp: FeedForward::new(params, &format!("{name}.mlp"), &config.mlp)?,
        })
    }

    /// The block's output; see [`LatentAttention::forward`].
    pub fn forward(&self, x: Tensor<3>, angles: &Angles, batch: &MicroBatch) -> Tensor<3> {
        self.around(x, batch, |x, norm| self.attention.forward(x, norm, angles, batch))
    }

    /// The same for tokens of several sequences; see [`LatentAttention::extend`].
    pub fn extend(&self, x: Tensor<3>, step: &Step, angles: &Angles, cache: (usize, &mut PagedKvCache)) -> Tensor<3> {
        self.around(x, &MicroBatch::default(), |x, norm| self.attention.extend(x, norm, step, angles, cache))
    }

    fn around(
        &self,
        x: Tensor<3>,
        batch: &MicroBatch,
        attention: impl FnOnce(Residual, &Norm) -> Tensor<3>,
    ) -> Tensor<3> {
        let x = Residual::enter(x, &batch.pass);
        let attention = attention(x.clone(), &self.input_layernorm);
        let x = self.post_attention_layernorm.of_sum(x, attention);
        let mlp = self.mlp.forward(x.clone(), &self.post_attention_layernorm, batch);
        x.leave(mlp)
    }
}
