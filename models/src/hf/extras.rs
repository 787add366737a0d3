//! Tensors of Hugging Face checkpoints that are no weights, and older spellings of names.

use crate::DeepSeekV3Config;
use crate::family::FamilyConfig;

impl FamilyConfig {
    /// The start of names that checkpoints of the bare model, without its output layer, leave out: the published GPT-2
    /// files have `wte.weight` for `transformer.wte.weight`.
    pub fn hf_optional_prefix(&self) -> Option<&'static str> {
        match self {
            Self::Llama(_) | Self::Mixtral(_) | Self::DeepSeekV3(_) => None,
            Self::Gpt(_) => Some("transformer."),
        }
    }

    /// Whether a tensor that is no weight is known to follow from the configuration: tables of rotary frequencies and
    /// causal masks, which old versions of transformers wrote. `name` is without the optional prefix.
    pub fn hf_is_derived(&self, name: &str) -> bool {
        let (start, ends): (&str, &[&str]) = match self {
            Self::Llama(_) | Self::Mixtral(_) => ("model.", &["rotary_emb.inv_freq"]),
            Self::Gpt(_) => ("h.", &[".attn.bias", ".attn.masked_bias"]),
            // Copies of the model's embedding and output layer in the modules of multi-token prediction.
            Self::DeepSeekV3(_) => ("model.layers.", &[".embed_tokens.weight", ".shared_head.head.weight"]),
        };
        name.starts_with(start) && ends.iter().any(|end| name.ends_with(end))
    }

    /// A copy of another tensor that some checkpoints hold: the output layer that shares the embedding, and the
    /// embedding.
    pub fn hf_tied_copy(&self) -> Option<[&'static str; 2]> {
        let (tied, embedding) = match self {
            Self::Llama(config) => (config.tie_word_embeddings, "model.embed_tokens.weight"),
            Self::Mixtral(config) => (config.tie_word_embeddings, "model.embed_tokens.weight"),
            Self::Gpt(config) => (config.tie_word_embeddings, "transformer.wte.weight"),
            Self::DeepSeekV3(_) => return None,
        };
        tied.then_some(["lm_head.weight", embedding])
    }

    /// The model that a checkpoint has weights of, by the names of its tensors: transformers writes no modules of
    /// multi-token prediction, although `config.json` has their number.
    pub fn hf_present(self, has: impl Fn(&str) -> bool) -> Self {
        match self {
            Self::DeepSeekV3(config) if !has(&format!("model.layers.{}.enorm.weight", config.num_hidden_layers)) => {
                Self::DeepSeekV3(DeepSeekV3Config { num_nextn_predict_layers: 0, ..config })
            }
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::family::FamilyConfig;
    use crate::{GptConfig, LlamaConfig};

    #[test]
    fn weights_are_not_derived() {
        let gpt = FamilyConfig::Gpt(GptConfig::tiny());
        assert!(gpt.hf_is_derived("h.0.attn.bias") && gpt.hf_is_derived("h.11.attn.masked_bias"));
        assert!(!gpt.hf_is_derived("h.0.attn.c_attn.bias") && !gpt.hf_is_derived("h.0.mlp.c_fc.bias"));
        let llama = FamilyConfig::Llama(LlamaConfig::tiny());
        assert!(llama.hf_is_derived("model.layers.3.self_attn.rotary_emb.inv_freq"));
        assert!(!llama.hf_is_derived("model.layers.3.self_attn.q_proj.weight"));
        for config in [gpt, llama] {
            let names = crate::ModelConfig::hf_names(&config);
            let prefix = config.hf_optional_prefix().unwrap_or_default();
            assert!(names.iter().all(|(_, f)| !config.hf_is_derived(f.name.strip_prefix(prefix).unwrap_or(&f.name))));
        }
    }
}
