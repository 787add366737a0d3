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
            ("pooler", "vit.pooler.dense"),
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

    /// Files of `ViTModel` may lack the pooling layer.
    fn present(config: VitConfig, has: &dyn Fn(&str) -> bool) -> VitConfig {
        const POOLER: &str = "vit.pooler.dense.weight";
        let is_there = has(POOLER) || Self::older_names(POOLER).iter().any(|name| has(name));
        let pooler_output_size = config.pooler_output_size.filter(|_| is_there);
        VitConfig { pooler_output_size, ..config }
    }

    fn init(config: &VitConfig, device: &Device) -> Self {
        Self::new(config, device)
    }

    /// Files of `ViTModel` lack the first part.
    fn older_names(name: &str) -> Vec<String> {
        name.strip_prefix("vit.").map(String::from).into_iter().collect()
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

    /// `pixel_values [batch, channels, image_size, image_size]`, and perhaps `labels [batch]` of a model that classifies.
    fn run(&self, inputs: &ModuleInputs) -> Result<ModuleOutput, InputError> {
        let (classes, [channels, size]) = (self.classes(), self.image());
        let known = ["pixel_values", "labels"];
        inputs.expect_only(if classes.is_some() { &known } else { &known[..1] })?;
        let [batch, ..] = inputs.shape::<4>("pixel_values")?;
        inputs.expect_shape("pixel_values", &[batch, channels, size, size])?;
        inputs.expect_shape("labels", &[batch])?;
        let pixels = inputs.floats("pixel_values")?;
        let Some(classes) = classes else {
            let states = self.states(pixels);
            let output = ModuleOutput { tensors: Vec::new(), loss: None }.with("last_hidden_state", states.clone());
            return Ok(match self.pool(states) {
                Some(pooled) => output.with("pooler_output", pooled),
                None => output,
            });
        };
        let labels = inputs.has("labels").then(|| inputs.ids("labels", classes)).transpose()?;
        let logits = self.forward(pixels);
        let loss = labels.map(|labels| Self::loss(logits.clone(), labels));
        Ok(ModuleOutput::new(logits, loss))
    }
}
