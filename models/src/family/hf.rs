//! `config.json` of a model of any family, both ways.

use serde_json::Value;

use super::FamilyConfig;
use crate::hf::{ConfigReader, HARMLESS, HfError, module_classes};
use crate::{
    DeepSeekV3Config, GptConfig, LlamaConfig, LlamaVariant, Mamba2Config, MixtralConfig, MixtralVariant, ModelConfig,
    NemotronHConfig,
};

impl FamilyConfig {
    /// Reads the `config.json` of any model that we have.
    ///
    /// # Errors
    /// Names the architecture or the key that we do not have, or sizes that contradict each other or are beyond any
    /// model, and what is legal.
    pub fn from_hf(config: &Value) -> Result<Self, HfError> {
        let reader = ConfigReader::new(config)?;
        let kind = reader.text("model_type")?.ok_or_else(|| HfError::Missing { key: "model_type".into() })?;
        if let Some(variant) = LlamaVariant::of_model_type(kind) {
            let read = Self::Llama(LlamaConfig::from_hf(config, variant)?);
            read.check()?;
            return Ok(read);
        }
        let read = match kind {
            "mixtral" => MixtralConfig::from_hf(config, MixtralVariant::Mixtral).map(Self::Mixtral),
            "qwen3_moe" => MixtralConfig::from_hf(config, MixtralVariant::Qwen3Moe).map(Self::Mixtral),
            "qwen3_next" => MixtralConfig::from_hf(config, MixtralVariant::Qwen3Next).map(Self::Mixtral),
            "qwen2_moe" => MixtralConfig::from_hf(config, MixtralVariant::Qwen2Moe).map(Self::Mixtral),
            "glm4_moe" => MixtralConfig::from_hf(config, MixtralVariant::Glm4Moe).map(Self::Mixtral),
            "gpt_oss" => MixtralConfig::from_hf(config, MixtralVariant::GptOss).map(Self::Mixtral),
            "gpt2" => GptConfig::from_hf(config).map(Self::Gpt),
            "deepseek_v3" | "kimi_k2" => DeepSeekV3Config::from_hf(config).map(Self::DeepSeekV3),
            "mamba2" => Mamba2Config::from_hf(config).map(Self::Mamba2),
            "nemotron_h" => NemotronHConfig::from_hf(config).map(Self::NemotronH),
            other if module_classes(other).is_some() => Err(HfError::Module { kind: other.into() }),
            other => Err(HfError::Architecture { key: "model_type", value: other.into() }),
        }?;
        read.check()?;
        Ok(read)
    }

    /// The `config.json` of this model, in the form of transformers 5.
    ///
    /// # Errors
    /// If Hugging Face's model cannot say what this one does.
    pub fn to_hf(&self) -> Result<Value, HfError> {
        match self {
            Self::Llama(config) => Ok(config.to_hf()),
            Self::Mixtral(config) => Ok(config.to_hf()),
            Self::Gpt(config) => config.to_hf(),
            Self::DeepSeekV3(config) => Ok(config.to_hf()),
            Self::Mamba2(config) => Ok(config.to_hf()),
            Self::NemotronH(config) => Ok(config.to_hf()),
        }
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
