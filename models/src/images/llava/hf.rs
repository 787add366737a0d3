//! LLaVA in Hugging Face's words.

use backend_dist::parallelize::Plan;
use burn::tensor::Device;
use serde_json::Value;

use super::{Llava, LlavaConfig};
use crate::hf::{HfError, HfModule, InputError, ModuleInputs, ModuleNames, ModuleOutput};

impl HfModule for Llava {
    type Config = LlavaConfig;

    const NAMES: ModuleNames = ModuleNames {
        pairs: &[
            ("tower.patches", "vision_tower.embeddings.patch_embedding"),
            ("tower.class", "vision_tower.embeddings.class_embedding"),
            ("tower.positions", "vision_tower.embeddings.position_embedding.weight"),
            ("tower.first_norm", "vision_tower.pre_layrnorm"),
            ("tower.blocks.*.attention_norm", "vision_tower.encoder.layers.*.layer_norm1"),
            ("tower.blocks.*.attention.query", "vision_tower.encoder.layers.*.self_attn.q_proj"),
            ("tower.blocks.*.attention.key", "vision_tower.encoder.layers.*.self_attn.k_proj"),
            ("tower.blocks.*.attention.value", "vision_tower.encoder.layers.*.self_attn.v_proj"),
            ("tower.blocks.*.attention.output", "vision_tower.encoder.layers.*.self_attn.out_proj"),
            ("tower.blocks.*.mlp_norm", "vision_tower.encoder.layers.*.layer_norm2"),
            ("tower.blocks.*.mlp.inner", "vision_tower.encoder.layers.*.mlp.fc1"),
            ("tower.blocks.*.mlp.outer", "vision_tower.encoder.layers.*.mlp.fc2"),
            ("tower.last_norm", "vision_tower.post_layernorm"),
            ("projector.inner", "multi_modal_projector.linear_1"),
            ("projector.outer", "multi_modal_projector.linear_2"),
            ("decoder.embedding", "language_model.model.embed_tokens"),
            ("decoder.blocks.*.attention_norm", "language_model.model.layers.*.input_layernorm"),
            ("decoder.blocks.*.attention.query", "language_model.model.layers.*.self_attn.q_proj"),
            ("decoder.blocks.*.attention.key", "language_model.model.layers.*.self_attn.k_proj"),
            ("decoder.blocks.*.attention.value", "language_model.model.layers.*.self_attn.v_proj"),
            ("decoder.blocks.*.attention.output", "language_model.model.layers.*.self_attn.o_proj"),
            ("decoder.blocks.*.mlp_norm", "language_model.model.layers.*.post_attention_layernorm"),
            ("decoder.blocks.*.gate", "language_model.model.layers.*.mlp.gate_proj"),
            ("decoder.blocks.*.up", "language_model.model.layers.*.mlp.up_proj"),
            ("decoder.blocks.*.down", "language_model.model.layers.*.mlp.down_proj"),
            ("decoder.norm", "language_model.model.norm"),
            ("decoder.head", "language_model.lm_head"),
        ],
        // Of models whose logits are the embedding's.
        copies: &[
            ("language_model.lm_head.weight", "language_model.model.embed_tokens.weight"),
            ("lm_head.weight", "model.language_model.embed_tokens.weight"),
        ],
        derived: &[
            "vision_tower.embeddings.position_ids",
            "vision_tower.vision_model.embeddings.position_ids",
            "model.vision_tower.embeddings.position_ids",
            "model.vision_tower.vision_model.embeddings.position_ids",
        ],
    };

    fn from_hf(config: &Value) -> Result<LlavaConfig, HfError> {
        LlavaConfig::from_hf(config)
    }

    fn to_hf(config: &LlavaConfig) -> Value {
        config.to_hf()
    }

    fn init(config: &LlavaConfig, device: &Device) -> Self {
        Self::new(config, device)
    }

    /// The first published folders have CLIP's model in the tower's; versions from 4.52 wrote the model as one part and
    /// the output layer as the other, with CLIP's model in the tower's or not.
    fn older_names(name: &str) -> Vec<String> {
        let one_part = |name: &str| match name.strip_prefix("language_model.") {
            Some(output) if output.starts_with("lm_head.") => output.into(),
            Some(rest) => rest.replacen("model.", "model.language_model.", 1),
            None => format!("model.{name}"),
        };
        let nested = name.replacen("vision_tower.", "vision_tower.vision_model.", 1);
        vec![one_part(name), one_part(&nested), nested]
    }

    /// As one part and the output layer: those of versions from 5 on, from 4.52 on, and before.
    fn names_in_memory(name: &str) -> Vec<String> {
        Self::older_names(name)
            .into_iter()
            .take(2)
            .chain([name.replacen("vision_tower.", "vision_tower.vision_model.", 1)])
            .collect()
    }

    const PEFT_TASK: Option<&'static str> = Some("CAUSAL_LM");

    fn plan() -> Plan {
        Self::plan()
    }

    /// `input_ids [batch, sequence]` with as many image tokens as the images of
    /// `pixel_values [images, channels, image_size, image_size]` have features, and perhaps `labels` like `input_ids`
    /// and an `attention_mask` without padding.
    fn run(&self, inputs: &ModuleInputs) -> Result<ModuleOutput, InputError> {
        let (vocabulary, image) = (self.decoder().vocabulary(), self.image());
        inputs.expect_only(&["input_ids", "attention_mask", "pixel_values", "labels"])?;
        let shape = inputs.shape::<2>("input_ids")?;
        for name in ["attention_mask", "labels"] {
            inputs.expect_shape(name, &shape)?;
        }
        inputs.expect_all::<2>("attention_mask", 1)?;
        let [images, ..] = inputs.shape::<4>("pixel_values")?;
        inputs.expect_shape("pixel_values", &[images, image[0], image[1], image[1]])?;
        let ids = inputs.ids("input_ids", vocabulary)?;
        let labels = inputs.has("labels").then(|| inputs.next_labels("labels", vocabulary)).transpose()?;
        let found = inputs.count("input_ids", self.image_token())?;
        let needed = images * self.image_tokens();
        if found != needed {
            let legal = format!("{needed}, those of {images} images");
            return Err(InputError::Count { name: "input_ids".into(), token: self.image_token(), found, legal });
        }
        let logits = self.forward(ids, inputs.floats("pixel_values")?);
        let loss = labels.map(|labels| Self::loss(logits.clone(), labels));
        Ok(ModuleOutput::new(logits, loss))
    }
}
