//! Llama's forward pass.

use std::sync::Arc;

use backend_dist::shard::Registry;
use burn::module::Module;
use burn::tensor::{Int, Tensor};

use super::config::LlamaConfig;
use crate::causal_lm::{CausalLm, ModelConfig};
use crate::layers::{
    Dropout, DropoutKey, KvCache, Norm, NormKind, OutputLayer, RotaryEmbedding, TransformerBlock,
    VocabParallelEmbedding,
};
use crate::param::{BuildError, ParamBuilder};

/// A rank's part of a Llama.
#[derive(Module, Debug)]
pub struct Llama {
    embed_tokens: VocabParallelEmbedding,
    layers: Vec<TransformerBlock>,
    norm: Norm,
    lm_head: OutputLayer,
    #[module(skip)]
    dropout: Dropout,
    #[module(skip)]
    rope: RotaryEmbedding,
    #[module(skip)]
    registry: Arc<Registry>,
}

impl CausalLm for Llama {
    type Config = LlamaConfig;

    fn build(config: &LlamaConfig, mut params: ParamBuilder) -> Result<Self, BuildError> {
        config.check()?;
        config.dims().check_tp(params.place().size)?;
        let params = &mut params;
        let (hidden, init) = (config.hidden_size, config.init());
        let divisor = config.make_vocab_size_divisible_by;
        let embed_tokens =
            VocabParallelEmbedding::new(params, "embed_tokens", config.vocab_size, hidden, divisor, init)?;
        let block = config.block();
        let layers = (0..config.num_hidden_layers)
            .map(|layer| TransformerBlock::new(params, &format!("layers.{layer}"), &block))
            .collect::<Result<_, _>>()?;
        let norm = Norm::new(params, "norm", hidden, NormKind::Rms, config.rms_norm_eps)?;
        let lm_head = match config.tie_word_embeddings {
            true => OutputLayer::tied(params, &embed_tokens),
            false => OutputLayer::untied(params, "lm_head", &embed_tokens, init)?,
        };
        Ok(Self {
            embed_tokens,
            layers,
            norm,
            lm_head,
            dropout: Dropout::new(params.parallel(), "embed_tokens", config.hidden_dropout),
            rope: RotaryEmbedding::new(&config.rope()),
            registry: Arc::new(params.take_registry()),
        })
    }

    fn training_losses(
        &self,
        tokens: Tensor<2, Int>,
        labels: Tensor<2, Int>,
        dropout: Option<&DropoutKey>,
    ) -> Tensor<2> {
        let x = self.hidden_states(tokens, dropout);
        self.lm_head.token_losses(x, labels.transpose(), &self.embed_tokens).transpose()
    }

    fn logits(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        self.lm_head.logits(self.hidden_states(tokens, None), &self.embed_tokens).swap_dims(0, 1)
    }

    fn extend(&self, tokens: Tensor<2, Int>, cache: &mut KvCache) -> Tensor<2> {
        let at = cache.advance(tokens.dims()[1]);
        let x = self.embed_tokens.extend(tokens.transpose());
        let angles = self.rope.angles(at.clone(), x.dtype(), &x.device());
        let x = (self.layers.iter().enumerate())
            .fold(x, |x, (index, layer)| layer.extend(x, &at, Some(&angles), cache.layer(index)));
        self.lm_head.logits_at(self.norm.forward(x), at.len() - 1, &self.embed_tokens)
    }

    fn registry(&self) -> &Registry {
        &self.registry
    }
}

impl Llama {
    /// The last hidden states of `tokens [b, s]`: `[s, b, hidden]`, under sequence parallelism `[s/tp, b, hidden]`.
    fn hidden_states(&self, tokens: Tensor<2, Int>, dropout: Option<&DropoutKey>) -> Tensor<3> {
        let seq = tokens.dims()[1];
        let x = self.embed_tokens.forward(tokens.transpose());
        let angles = self.rope.angles(0..seq, x.dtype(), &x.device());
        let x = self.dropout.forward(x, dropout);
        let x = self.layers.iter().fold(x, |x, layer| layer.forward(x, Some(&angles), dropout));
        self.norm.forward(x)
    }
}
