//! What others know of Llama and its relatives by name.

use serde_json::{Value, json};

use super::config::{LlamaConfig, OWNED};
use super::variant::{LlamaVariant, VARIANTS};
use crate::family::{Family, MegatronModel, PrunedSizes, Sample, SampleSizes};
use crate::hf::{HfArchitecture, HfError};
use crate::layers::LayerPattern;
use crate::sized;

impl Family for LlamaConfig {
    const SIZES: &'static [(&'static str, &'static str)] = &[
        ("no_rope_layer_interval", "Layers without RoPE: the last of every so many, or a list"),
        ("rope_local_base_freq", "RoPE base of the layers with a sliding window"),
        ("query_pre_attn_scalar", "Attention scores are divided by its square root; none: head-dim"),
        (
            "attn_logit_softcapping",
            "Softcap of the attention scores; no GPU kernel has it, so attention is slower there",
        ),
        ("final_logit_softcapping", "Softcap of the output logits"),
        ("embedding_multiplier", "Factor of the embeddings"),
        ("attention_multiplier", "Factor of the attention scores; none: 1 / sqrt(head-dim)"),
        ("residual_multiplier", "Factor of what attention and MLP add to the residual stream"),
        ("logits_scaling", "The output logits are divided by it"),
    ];

    fn architectures() -> Vec<HfArchitecture> {
        VARIANTS.map(|variant| variant.architecture().hf).to_vec()
    }

    fn read_hf(config: &Value, kind: &str) -> Result<Self, HfError> {
        let variant = VARIANTS.into_iter().find(|variant| variant.architecture().hf.model_type == kind);
        Self::from_hf(config, variant.unwrap_or_default())
    }

    fn write_hf(&self) -> Result<Value, HfError> {
        if self.variant.has("query_pre_attn_scalar") {
            self.whole_scalar()?;
        }
        Ok(self.to_hf())
    }

    fn owners(key: &str) -> Vec<String> {
        let has = |variant: &LlamaVariant| key == "variant" || OWNED.contains(&key) && variant.has(key);
        let name = |variant| json!(variant).as_str().unwrap_or_default().to_string();
        VARIANTS.into_iter().filter(has).map(name).collect()
    }

    fn samples(sizes: &SampleSizes) -> Vec<Sample<Self>> {
        use LlamaVariant::*;
        let of = |name, about, variant| Sample::new(name, about, sample(sizes, variant));
        vec![
            of("llama", "RMSNorm, rotary positions, SwiGLU, grouped queries", Llama),
            of("mistral", "Llama with a sliding window of a quarter of the sequence", Mistral),
            of("qwen2", "Llama with biases of queries, keys and values", Qwen2),
            of("qwen3", "Llama with norms of every query and key head", Qwen3),
            of("smollm3", "Llama with a second layer, and every second, without rotary positions", SmolLm3),
            of("olmo2", "Norms after attention and MLP, norms of whole queries and keys", Olmo2),
            of("olmo3", "The same with a window in every other layer", Olmo3),
            of("gemma", "Norms of 1 + weight, GeGLU, scaled embeddings", Gemma),
            of(
                "gemma2",
                "Norms of 1 + weight before and after, GeGLU, soft caps, a window in every other layer, scaled embeddings",
                Gemma2,
            ),
            of(
                "gemma3",
                "The same without soft caps, with norms of every query and key head, and other frequencies in windowed layers",
                Gemma3,
            ),
            of("phi3", "Llama with rotary positions of half of the features, and a window", Phi3),
            of(
                "glm4",
                "Norms before and after, rotary positions of half of the features, biases of queries, keys and values",
                Glm4,
            ),
            of("seed-oss", "Llama with biases of queries, keys and values", SeedOss),
            of("ernie4-5", "Llama whose files have the rows of heads in another order", Ernie45),
            of("granite", "Llama with factors of embeddings, scores, residuals and logits", Granite),
        ]
    }

    fn of_megatron(model: &MegatronModel) -> Option<Self> {
        model.experts.is_none().then(|| {
            sized! { Self::tiny();
                vocab_size: model.vocab_size, hidden_size: model.hidden_size,
                intermediate_size: model.ffn_hidden_size, num_hidden_layers: model.num_layers,
                num_attention_heads: model.num_attention_heads, num_key_value_heads: model.num_query_groups,
                head_dim: model.head_dim(), rope_theta: model.rotary_base, rms_norm_eps: model.norm_epsilon,
                tie_word_embeddings: model.tied
            }
        })
    }

    /// Layers keep their kinds.
    fn pruned(&self, to: &PrunedSizes) -> Option<Self> {
        let kept = |pattern: &Option<LayerPattern>| {
            LayerPattern::of(to.layers.len(), |layer| pattern.as_ref().is_some_and(|of| of.has(to.layers[layer])))
        };
        Some(sized! { self.clone();
            sliding_window_pattern: kept(&self.sliding_window_pattern),
            no_rope_layer_interval: kept(&self.no_rope_layer_interval),
            num_hidden_layers: to.layers.len(), hidden_size: to.hidden, intermediate_size: to.intermediate,
            num_key_value_heads: to.kv_heads,
            num_attention_heads: to.kv_heads * self.num_attention_heads / self.num_key_value_heads
        })
    }
}

fn sample(sizes: &SampleSizes, variant: LlamaVariant) -> LlamaConfig {
    use LlamaVariant::{Ernie45, Gemma, Gemma2, Gemma3, Glm4, Granite, Mistral, Olmo3, Phi3, SeedOss, SmolLm3};
    let gemma = matches!(variant, Gemma2 | Gemma3);
    let of_granite = |factor| (variant == Granite).then_some(factor);
    LlamaConfig {
        variant,
        sliding_window: matches!(variant, Mistral | Olmo3 | Gemma2 | Gemma3 | Phi3).then_some((sizes.seq / 4).max(1)),
        sliding_window_pattern: (gemma || variant == Olmo3).then_some(LayerPattern::Every(2)),
        no_rope_layer_interval: (variant == SmolLm3).then_some(LayerPattern::Every(2)),
        partial_rotary_factor: matches!(variant, Phi3 | Glm4).then_some(0.5),
        rope_local_base_freq: (variant == Gemma3).then_some(1000.0),
        query_pre_attn_scalar: gemma.then_some(24.0),
        attn_logit_softcapping: (variant == Gemma2).then_some(2.0),
        final_logit_softcapping: (variant == Gemma2).then_some(1.0),
        embedding_multiplier: of_granite(12.0),
        attention_multiplier: of_granite(0.2),
        residual_multiplier: of_granite(0.5),
        logits_scaling: of_granite(4.0),
        attention_bias: matches!(variant, Glm4 | SeedOss),
        tie_word_embeddings: gemma || matches!(variant, Gemma | Ernie45 | Granite),
        vocab_size: sizes.vocab,
        hidden_size: sizes.hidden,
        intermediate_size: sizes.intermediate,
        num_hidden_layers: sizes.layers,
        num_attention_heads: sizes.heads,
        num_key_value_heads: sizes.kv_heads,
        head_dim: sizes.head_dim(),
        ..LlamaConfig::tiny()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pruned_layers_keep_their_kinds() {
        let model = LlamaConfig {
            variant: LlamaVariant::Gemma3,
            num_hidden_layers: 6,
            sliding_window: Some(8),
            sliding_window_pattern: Some(LayerPattern::Every(3)),
            ..LlamaConfig::tiny()
        };
        let of = |layers: &[usize]| {
            let to = PrunedSizes { layers: layers.to_vec(), hidden: 64, intermediate: 128, kv_heads: 4 };
            model.pruned(&to).unwrap().sliding_window_pattern
        };
        assert_eq!(of(&[0, 2, 3, 5]), Some(LayerPattern::Every(2)));
        assert_eq!(of(&[2, 3, 4]), Some(LayerPattern::At(vec![0])));
        assert_eq!(of(&[0, 1]), None);
    }
}
