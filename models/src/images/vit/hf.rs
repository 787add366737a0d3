//! ViT in Hugging Face's words.

use backend_dist::parallelize::Plan;
use burn::tensor::Device;
use serde_json::Value;

use super::{Vit, VitConfig};
use crate::hf::{HfError, HfModule, InputError, ModuleInputs, ModuleNames, ModuleOutput};

impl HfModule for Vit {
    type Config = VitConfig;

    const NAMES: ModuleNames = ModuleNames {
        pairs: &[
            ("patches", "vit.embeddings.patch_embeddings.projection"),
            ("class", "vit.embeddings.cls_token"),
            ("positions", "vit.embeddings.position_embeddings"),
            ("blocks.*.attention_norm", "vit.encoder.layer.*.layernorm_before"),
            ("blocks.*.attention.query", "vit.encoder.layer.*.attention.attention.query"),
            ("blocks.*.attention.key", "vit.encoder.layer.*.attention.attention.key"),
            ("blocks.*.attention.value", "vit.encoder.layer.*.attention.attention.value"),
            ("blocks.*.attention.output", "vit.encoder.layer.*.attention.output.dense"),
            ("blocks.*.mlp_norm", "vit.encoder.layer.*.layernorm_after"),
            ("blocks.*.mlp.inner", "vit.encoder.layer.*.intermediate.dense"),
            ("blocks.*.mlp.outer", "vit.encoder.layer.*.output.dense"),
            ("norm", "vit.layernorm"),
            ("head", "classifier"),
        ],
        copies: &[],
        derived: &[],
    };

    fn from_hf(config: &Value) -> Result<VitConfig, HfError> {
        VitConfig::from_hf(config)
    }

    fn to_hf(config: &VitConfig) -> Value {
        config.to_hf()
    }

    fn init(config: &VitConfig, device: &Device) -> Self {
        Self::new(config, device)
    }

    /// Files keep the names of the first versions.
    fn names_in_memory(name: &str) -> Vec<String> {
        const NEW: [(&str, &str); 7] = [
            ("encoder.layer.", "layers."),
            ("attention.attention.query.", "attention.q_proj."),
            ("attention.attention.key.", "attention.k_proj."),
            ("attention.attention.value.", "attention.v_proj."),
            ("attention.output.dense.", "attention.o_proj."),
            ("intermediate.dense.", "mlp.fc1."),
            ("output.dense.", "mlp.fc2."),
        ];
        let new = NEW.iter().fold(name.to_string(), |name, (old, new)| name.replacen(old, new, 1));
        vec![new, name.into()]
    }

    fn plan() -> Plan {
        Self::plan()
    }

    /// `pixel_values [batch, channels, image_size, image_size]`, and perhaps `labels [batch]`.
    fn run(&self, inputs: &ModuleInputs) -> Result<ModuleOutput, InputError> {
        inputs.expect_only(&["pixel_values", "labels"])?;
        let [batch, ..] = inputs.shape::<4>("pixel_values")?;
        let [channels, size] = self.image();
        inputs.expect_shape("pixel_values", &[batch, channels, size, size])?;
        inputs.expect_shape("labels", &[batch])?;
        let labels = inputs.has("labels").then(|| inputs.ids("labels", self.classes())).transpose()?;
        let logits = self.forward(inputs.floats("pixel_values")?);
        let loss = labels.map(|labels| Self::loss(logits.clone(), labels));
        Ok(ModuleOutput::new(logits, loss))
    }
}
