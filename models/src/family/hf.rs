//! `config.json` of a model of any family, both ways.

use serde_json::Value;

use super::{FAMILIES, FamilyConfig};
use crate::causal_lm::ModelConfig;
use crate::hf::{ConfigReader, HARMLESS, HfArchitecture, HfError, module_classes};

/// What Hugging Face calls the models of all families.
fn architectures() -> impl Iterator<Item = HfArchitecture> {
    FAMILIES.iter().flat_map(|family| (family.architectures)())
}

impl FamilyConfig {
    /// Reads the `config.json` of any model that we have.
    ///
    /// # Errors
    /// Names the architecture or the key that we do not have, or sizes that contradict each other or are beyond any
    /// model, and what is legal.
    pub fn from_hf(config: &Value) -> Result<Self, HfError> {
        let reader = ConfigReader::new(config)?;
        let kind = reader.text("model_type")?.ok_or_else(|| HfError::Missing { key: "model_type".into() })?;
        let has = |of: &HfArchitecture| of.model_type == kind;
        let Some(family) = FAMILIES.iter().find(|family| (family.architectures)().iter().any(has)) else {
            let supported = architectures().map(|of| of.to_string()).collect::<Vec<_>>().join(", ");
            return Err(match module_classes(kind) {
                Some(_) => HfError::Module { kind: kind.into(), supported },
                None => HfError::Architecture { key: "model_type", value: kind.into(), supported },
            });
        };
        let read = (family.read_hf)(config, kind)?;
        read.check()?;
        Ok(read)
    }

    /// The `config.json` of this model, which was once read from `original`: the same file if the model is still that
    /// one, else a new file with the harmless keys of the old one (token ids, for example).
    pub fn to_hf_like(&self, original: &Value) -> Result<Value, HfError> {
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
