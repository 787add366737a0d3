//! Published sizes of vision models.

use serde_json::Value;

use super::{ClipVisionConfig, Llava, LlavaConfig, Vit, VitConfig};
use crate::LlamaConfig;
use crate::activation::Activation;
use crate::hf::HfModule;

/// Names of published models, and the `config.json` of their sizes: ViT base, large and huge with patches of 16, 16 and 14
/// pixels (arXiv:2010.11929, table 1), LLaVA 1.5 with CLIP's large tower at 336 pixels and a Llama 2 of 7 or 13 billion
/// parameters (arXiv:2310.03744, and the `config.json` of `llava-hf/llava-1.5-7b-hf`).
///
/// ```
/// let presets = models::images::presets();
/// let (_, huge) = presets.iter().find(|(name, _)| *name == "vit-huge").expect("it is one of them");
/// assert_eq!((&huge["model_type"], &huge["num_hidden_layers"]), (&"vit".into(), &32.into()));
/// ```
pub fn presets() -> [(&'static str, Value); 5] {
    let vit = |hidden_size, layers, heads, patch_size| {
        let config = VitConfig {
            hidden_size,
            intermediate_size: 4 * hidden_size,
            num_hidden_layers: layers,
            num_attention_heads: heads,
            image_size: 224,
            patch_size,
            num_labels: Some(1000),
            ..VitConfig::tiny()
        };
        Vit::to_hf(&config)
    };
    let llava = |hidden_size, intermediate_size, layers, heads| {
        let text_config = LlamaConfig {
            vocab_size: 32064,
            hidden_size,
            intermediate_size,
            num_hidden_layers: layers,
            num_attention_heads: heads,
            num_key_value_heads: heads,
            head_dim: 128,
            max_position_embeddings: 4096,
            rms_norm_eps: 1e-5,
            ..LlamaConfig::tiny()
        };
        let config = LlavaConfig {
            vision_config: clip_large(),
            text_config,
            image_token_index: 32000,
            feature_blocks: 23,
            ..LlavaConfig::tiny()
        };
        Llava::to_hf(&config)
    };
    [
        ("vit-base", vit(768, 12, 12, 16)),
        ("vit-large", vit(1024, 24, 16, 16)),
        ("vit-huge", vit(1280, 32, 16, 14)),
        ("llava-1.5-7b", llava(4096, 11008, 32, 32)),
        ("llava-1.5-13b", llava(5120, 13824, 40, 40)),
    ]
}

/// CLIP's large tower at 336 pixels (arXiv:2103.00020, section 2.5).
fn clip_large() -> ClipVisionConfig {
    ClipVisionConfig {
        hidden_size: 1024,
        intermediate_size: 4096,
        num_hidden_layers: 24,
        num_attention_heads: 16,
        hidden_act: Activation::QuickGelu,
        image_size: 336,
        patch_size: 14,
        ..ClipVisionConfig::tiny()
    }
}
