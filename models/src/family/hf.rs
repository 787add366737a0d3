//! `config.json` of a model of any family, both ways.

use serde_json::Value;

use super::nearest::nearest;
use super::{FAMILIES, FamilyConfig};
use crate::causal_lm::ModelConfig;
use crate::hf::{ConfigReader, HARMLESS, HfArchitecture, HfError, gemma3, module_classes};

/// What Hugging Face calls the models of all families.
fn architectures() -> impl Iterator<Item = HfArchitecture> {
    FAMILIES.iter().flat_map(|family| (family.architectures)())
}

impl FamilyConfig {
    /// Reads the `config.json` of any model that we have; of a Gemma 3 with images its language model's.
    ///
    /// # Errors
    /// Names the architecture or the key that we do not have, or sizes that contradict each other or are beyond any
    /// model, and what is legal.
    pub fn from_hf(config: &Value) -> Result<Self, HfError> {
        if let Some(text) = gemma3::language_model(config)? {
            return Self::from_hf(&text).map_err(|error| error.inside("text_config"));
        }
        let reader = ConfigReader::new(config)?;
        let kind = reader.text("model_type")?.ok_or_else(|| match reader.has("ssm_cfg") {
            true => HfError::StateSpaces,
            false => HfError::Missing { key: "model_type".into() },
        })?;
        let has = |of: &HfArchitecture| of.model_type == kind;
        let Some(family) = FAMILIES.iter().find(|family| (family.architectures)().iter().any(has)) else {
            return Err(unknown(kind));
        };
        let read = (family.read_hf)(config, kind)?;
        read.check()?;
        Ok(read)
    }

    /// The `config.json` of this model, which was once read from `original`: the same file if the model is still that
    /// one, else a new file with the harmless keys of the old one (token ids, for example). Of a Gemma 3 with images the
    /// language model's is written.
    pub fn to_hf_like(&self, original: &Value) -> Result<Value, HfError> {
        if let Some(text) = gemma3::language_model(original)? {
            return self.to_hf_like(&text);
        }
        let mut written = self.to_hf()?;
        if Self::from_hf(original).is_ok_and(|config| config.to_hf().is_ok_and(|same| same == written)) {
            let mut original = original.clone();
            // Weights are written in types of their own.
            original.as_object_mut().map(|keys| keys.remove("quantization_config"));
            return Ok(original);
        }
        let (Some(written_keys), Some(keys)) = (written.as_object_mut(), original.as_object()) else {
            return Ok(written);
        };
        for (key, value) in keys.iter().filter(|(key, _)| HARMLESS.contains(&key.as_str())) {
            written_keys.insert(key.clone(), value.clone());
        }
        Ok(written)
    }
}

/// Why there is no model of this `model_type`.
fn unknown(kind: &str) -> HfError {
    if module_classes(kind).is_some() {
        let supported = architectures().map(|of| of.to_string()).collect::<Vec<_>>().join(", ");
        return HfError::Module { kind: kind.into(), supported };
    }
    let mut legal: Vec<&str> = architectures().map(|of| of.model_type).collect();
    let text_alone = legal.iter().position(|name| *name == "gemma3_text").map_or(legal.len(), |at| at + 1);
    legal.insert(text_alone, gemma3::WHOLE.model_type);
    let nearest = nearest(kind, &legal).unwrap_or_default();
    HfError::ModelType { kind: kind.into(), nearest, legal: legal.join(", ") }
}
