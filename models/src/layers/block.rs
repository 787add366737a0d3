//! A transformer block: norm, attention, residual; norm, MLP, residual.

use std::ops::Range;

use backend_dist::ops::Residual;
use burn::module::Module;
use burn::tensor::Tensor;

use super::attention::{AttentionConfig, SelfAttention};
use super::cache::LayerCache;
use super::dropout::Dropout;
use super::feed_forward::FeedForward;
use super::moe::Ffn;
use super::norm::{Norm, NormKind};
use super::rope::Angles;
use crate::micro_batch::MicroBatch;
use crate::param::{BuildError, ParamBuilder};

/// Everything a pre-norm block is made of.
#[derive(Clone, Copy, Debug)]
pub struct BlockConfig {
    /// Attention.
    pub attention: AttentionConfig,
    /// MLP or MoE.
    pub mlp: Ffn,
    /// Which norm stands before both.
    pub norm: NormKind,
    /// Epsilon of the norms.
    pub norm_eps: f64,
    /// Share of the elements that are dropped before each residual addition.
    pub dropout: f64,
}

/// One layer of a decoder. Activations between its parts are `[s, b, hidden]`, under sequence parallelism
/// `[s/tp, b, hidden]`.
#[derive(Module, Debug)]
pub struct TransformerBlock {
    input_layernorm: Norm,
    attention: SelfAttention,
    post_attention_layernorm: Norm,
    mlp: FeedForward,
    #[module(skip)]
    attention_dropout: Dropout,
    #[module(skip)]
    mlp_dropout: Dropout,
}

impl TransformerBlock {
    /// A block under the global name `name`, for example `layers.0`.
    ///
    /// # Errors
    /// See [`BuildError`].
    pub fn new(params: &mut ParamBuilder, name: &str, config: &BlockConfig) -> Result<Self, BuildError> {
        let hidden = config.attention.hidden;
        let (input, post) = (format!("{name}.input_layernorm"), format!("{name}.post_attention_layernorm"));
        let (attention, mlp) = (format!("{name}.attention"), format!("{name}.mlp"));
        let parallel = params.parallel().clone();
        Ok(Self {
            input_layernorm: Norm::new(params, &input, hidden, config.norm, config.norm_eps)?,
            attention: SelfAttention::new(params, &attention, &config.attention)?,
            post_attention_layernorm: Norm::new(params, &post, hidden, config.norm, config.norm_eps)?,
            mlp: FeedForward::new(params, &mlp, &config.mlp)?,
            attention_dropout: Dropout::new(&parallel, &attention, config.dropout),
            mlp_dropout: Dropout::new(&parallel, &mlp, config.dropout),
        })
    }

    /// The block's output; see [`SelfAttention::forward`] for `angles`.
    pub fn forward(&self, x: Tensor<3>, angles: Option<&Angles>, batch: &MicroBatch) -> Tensor<3> {
        self.around(x, batch, |x, norm| self.attention.forward(x, norm, angles, batch))
    }

    /// The same for positions that follow those in the cache; see [`SelfAttention::extend`].
    pub fn extend(
        &self,
        x: Tensor<3>,
        at: &Range<usize>,
        angles: Option<&Angles>,
        cache: &mut LayerCache,
    ) -> Tensor<3> {
        self.around(x, &MicroBatch::default(), |x, norm| self.attention.extend(x, norm, at, angles, cache))
    }

    fn around(
        &self,
        x: Tensor<3>,
        batch: &MicroBatch,
        attention: impl FnOnce(Residual, &Norm) -> Tensor<3>,
    ) -> Tensor<3> {
        let x = Residual::enter(x, &batch.pass);
        let attention = attention(x.clone(), &self.input_layernorm);
        let x = self.post_attention_layernorm.of_sum(x, self.attention_dropout.forward(attention, batch));
        let mlp = self.mlp.forward(x.clone(), &self.post_attention_layernorm, batch);
        x.leave(self.mlp_dropout.forward(mlp, batch))
    }
}
