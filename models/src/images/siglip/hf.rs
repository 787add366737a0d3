//! SigLIP in Hugging Face's words.

use backend_dist::parallelize::Plan;
use burn::tensor::Device;
use serde_json::Value;

use super::{Siglip, SiglipConfig};
use crate::hf::{HfError, HfModule, InputError, ModuleInputs, ModuleNames, ModuleOutput};

impl HfModule for Siglip {
    type Config = SiglipConfig;

    const NAMES: ModuleNames = ModuleNames {
        pairs: &[
            ("tower.patches", "vision_model.embeddings.patch_embedding"),
            ("tower.positions", "vision_model.embeddings.position_embedding.weight"),
            ("tower.blocks.*.attention_norm", "vision_model.encoder.layers.*.layer_norm1"),
            ("tower.blocks.*.attention.query", "vision_model.encoder.layers.*.self_attn.q_proj"),
            ("tower.blocks.*.attention.key", "vision_model.encoder.layers.*.self_attn.k_proj"),
            ("tower.blocks.*.attention.value", "vision_model.encoder.layers.*.self_attn.v_proj"),
            ("tower.blocks.*.attention.output", "vision_model.encoder.layers.*.self_attn.out_proj"),
            ("tower.blocks.*.mlp_norm", "vision_model.encoder.layers.*.layer_norm2"),
            ("tower.blocks.*.mlp.inner", "vision_model.encoder.layers.*.mlp.fc1"),
            ("tower.blocks.*.mlp.outer", "vision_model.encoder.layers.*.mlp.fc2"),
            ("tower.last_norm", "vision_model.post_layernorm"),
            ("head.probe", "vision_model.head.probe"),
            ("head.joint", "vision_model.head.attention.in_proj_weight"),
            ("head.joint_bias", "vision_model.head.attention.in_proj_bias"),
            ("head.out", "vision_model.head.attention.out_proj"),
            ("head.norm", "vision_model.head.layernorm"),
            ("head.mlp.inner", "vision_model.head.mlp.fc1"),
            ("head.mlp.outer", "vision_model.head.mlp.fc2"),
            ("classifier", "classifier"),
        ],
        copies: &[],
        derived: &["vision_model.embeddings.position_ids"],
    };

    fn from_hf(config: &Value) -> Result<SiglipConfig, HfError> {
        SiglipConfig::from_hf(config)
    }

    fn to_hf(config: &SiglipConfig) -> Value {
        config.to_hf()
    }

    /// There is none.
    fn without_dropout(config: SiglipConfig) -> SiglipConfig {
        config
    }

    fn init(config: &SiglipConfig, device: &Device) -> Self {
        Self::new(config, device)
    }

    /// Files of `SiglipVisionModel` alone lack the first part since transformers 5, which reads them with it too.
    fn older_names(name: &str) -> Vec<String> {
        name.strip_prefix("vision_model.").map(String::from).into_iter().collect()
    }

    fn plan() -> Plan {
        Self::plan()
    }

    /// `pixel_values [batch, channels, image_size, image_size]`, and perhaps `labels [batch]` of a model that classifies.
    fn run(&self, inputs: &ModuleInputs) -> Result<ModuleOutput, InputError> {
        let (classes, [channels, size]) = (self.classes(), self.image());
        let known = ["pixel_values", "labels"];
        inputs.expect_only(if classes.is_some() { &known } else { &known[..1] })?;
        let [batch, ..] = inputs.shape::<4>("pixel_values")?;
        inputs.expect_shape("pixel_values", &[batch, channels, size, size])?;
        inputs.expect_shape("labels", &[batch])?;
        let labels = match classes.filter(|_| inputs.has("labels")) {
            Some(classes) => Some(inputs.ids("labels", classes)?),
            None => None,
        };
        let states = self.states(inputs.floats("pixel_values")?);
        if let Some(logits) = self.classify(states.clone()) {
            let loss = labels.map(|labels| Self::loss(logits.clone(), labels));
            return Ok(ModuleOutput::new(logits, loss));
        }
        let output = ModuleOutput { tensors: Vec::new(), loss: None }.with("last_hidden_state", states.clone());
        Ok(match self.pool(states) {
            Some(pooled) => output.with("pooler_output", pooled),
            None => output,
        })
    }
}
