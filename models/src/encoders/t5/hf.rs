//! T5 in Hugging Face's words.

use backend_dist::parallelize::Plan;
use burn::tensor::Device;
use serde_json::Value;

use super::config::T5Config;
use super::model::T5;
use crate::encoders::cross_entropy;
use crate::hf::{HfError, HfModule, InputError, ModuleInputs, ModuleNames, ModuleOutput};

impl HfModule for T5 {
    type Config = T5Config;

    const NAMES: ModuleNames = ModuleNames {
        pairs: &[
            ("shared", "shared"),
            ("encoder.positions.bias", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
            ("encoder.blocks.*.attention_norm", "encoder.block.*.layer.0.layer_norm"),
            ("encoder.blocks.*.attention.query", "encoder.block.*.layer.0.SelfAttention.q"),
            ("encoder.blocks.*.attention.key", "encoder.block.*.layer.0.SelfAttention.k"),
            ("encoder.blocks.*.attention.value", "encoder.block.*.layer.0.SelfAttention.v"),
            ("encoder.blocks.*.attention.output", "encoder.block.*.layer.0.SelfAttention.o"),
            ("encoder.blocks.*.feed_forward_norm", "encoder.block.*.layer.1.layer_norm"),
            ("encoder.blocks.*.feed_forward.inner.Plain", "encoder.block.*.layer.1.DenseReluDense.wi"),
            ("encoder.blocks.*.feed_forward.inner.Gated.gate", "encoder.block.*.layer.1.DenseReluDense.wi_0"),
            ("encoder.blocks.*.feed_forward.inner.Gated.up", "encoder.block.*.layer.1.DenseReluDense.wi_1"),
            ("encoder.blocks.*.feed_forward.outer", "encoder.block.*.layer.1.DenseReluDense.wo"),
            ("encoder.norm", "encoder.final_layer_norm"),
            ("decoder.positions.bias", "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
            ("decoder.blocks.*.attention_norm", "decoder.block.*.layer.0.layer_norm"),
            ("decoder.blocks.*.attention.query", "decoder.block.*.layer.0.SelfAttention.q"),
            ("decoder.blocks.*.attention.key", "decoder.block.*.layer.0.SelfAttention.k"),
            ("decoder.blocks.*.attention.value", "decoder.block.*.layer.0.SelfAttention.v"),
            ("decoder.blocks.*.attention.output", "decoder.block.*.layer.0.SelfAttention.o"),
            ("decoder.blocks.*.cross_attention_norm", "decoder.block.*.layer.1.layer_norm"),
            ("decoder.blocks.*.cross_attention.query", "decoder.block.*.layer.1.EncDecAttention.q"),
            ("decoder.blocks.*.cross_attention.key", "decoder.block.*.layer.1.EncDecAttention.k"),
            ("decoder.blocks.*.cross_attention.value", "decoder.block.*.layer.1.EncDecAttention.v"),
            ("decoder.blocks.*.cross_attention.output", "decoder.block.*.layer.1.EncDecAttention.o"),
            ("decoder.blocks.*.feed_forward_norm", "decoder.block.*.layer.2.layer_norm"),
            ("decoder.blocks.*.feed_forward.inner.Plain", "decoder.block.*.layer.2.DenseReluDense.wi"),
            ("decoder.blocks.*.feed_forward.inner.Gated.gate", "decoder.block.*.layer.2.DenseReluDense.wi_0"),
            ("decoder.blocks.*.feed_forward.inner.Gated.up", "decoder.block.*.layer.2.DenseReluDense.wi_1"),
            ("decoder.blocks.*.feed_forward.outer", "decoder.block.*.layer.2.DenseReluDense.wo"),
            ("decoder.norm", "decoder.final_layer_norm"),
            ("head", "lm_head"),
        ],
        copies: &[
            ("encoder.embed_tokens.weight", "shared.weight"),
            ("decoder.embed_tokens.weight", "shared.weight"),
            ("lm_head.weight", "shared.weight"),
        ],
        // The first published files have it, and no model uses it.
        derived: &["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"],
    };

    fn from_hf(config: &Value) -> Result<T5Config, HfError> {
        T5Config::read(config)
    }

    fn to_hf(config: &T5Config) -> Value {
        config.write()
    }

    /// transformers 5 writes that weights are tied of models whose head has its own; those do not scale.
    fn present(config: T5Config, has: &dyn Fn(&str) -> bool) -> T5Config {
        let own_head = !config.scale_decoder_outputs && has("lm_head.weight");
        T5Config { tie_word_embeddings: config.tie_word_embeddings && !own_head, ..config }
    }

    fn without_dropout(config: T5Config) -> T5Config {
        T5Config { dropout_rate: 0.0, ..config }
    }

    fn init(config: &T5Config, device: &Device) -> Self {
        Self::new(config, device)
    }

    const PEFT_TASK: Option<&'static str> = Some("SEQ_2_SEQ_LM");

    fn plan() -> Plan {
        Self::plan()
    }

    /// `input_ids [batch, input]`, perhaps `attention_mask` of the same shape (0 is padding), `labels [batch, output]` and
    /// `decoder_input_ids` of the same shape; without those the decoder reads the labels, shifted.
    fn run(&self, inputs: &ModuleInputs) -> Result<ModuleOutput, InputError> {
        let [vocabulary, _] = self.shared.weight.lazy_shape().dims();
        inputs.expect_only(&["input_ids", "attention_mask", "decoder_input_ids", "labels"])?;
        let shape @ [batch, _] = inputs.shape::<2>("input_ids")?;
        inputs.expect_shape("attention_mask", &shape)?;
        let target = if inputs.has("labels") { "labels" } else { "decoder_input_ids" };
        let [_, length] = inputs.shape::<2>(target)?;
        for name in ["labels", "decoder_input_ids"] {
            inputs.expect_shape(name, &[batch, length])?;
        }
        let ids = inputs.ids("input_ids", vocabulary)?;
        let mask = inputs.has("attention_mask").then(|| inputs.ids::<2>("attention_mask", 2)).transpose()?;
        let labels = inputs.has("labels").then(|| inputs.labels("labels", vocabulary)).transpose()?;
        let output = match &labels {
            Some(labels) if !inputs.has("decoder_input_ids") => self.shifted(labels.clone()),
            _ => inputs.ids("decoder_input_ids", vocabulary)?,
        };
        let logits = self.forward(ids, mask.map(|mask| mask.equal_elem(0)), output);
        let loss = labels.map(|labels| cross_entropy(logits.clone(), labels));
        Ok(ModuleOutput::new(logits, loss))
    }
}
