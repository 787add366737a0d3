//! A model of a family that is known only when the program runs.

mod hf;

use serde::{Deserialize, Serialize};

use crate::causal_lm::{CausalLm, ModelConfig, UnsharedPrefixes};
use crate::config::ConfigError;
use crate::layout::ModelDims;
use crate::names::NameMap;
use crate::{
    DeepSeekV3, DeepSeekV3Config, Gpt, GptConfig, Llama, LlamaConfig, Mamba2, Mamba2Config, Mixtral, MixtralConfig,
    NemotronH, NemotronHConfig,
};

/// The sizes of a model of any family.
///
/// ```
/// use models::{FamilyConfig, GptConfig, ModelConfig};
///
/// let config = FamilyConfig::Gpt(GptConfig::tiny());
/// assert_eq!((config.family(), config.vocab_size()), ("gpt", 256));
/// // Hugging Face's config.json, both ways.
/// let file = config.to_hf()?;
/// assert_eq!(file["n_layer"], 2);
/// assert_eq!(FamilyConfig::from_hf(&file)?, config);
/// # Ok::<(), models::hf::HfError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "family", rename_all = "lowercase")]
pub enum FamilyConfig {
    /// Llama, Mistral, Qwen3.
    Llama(LlamaConfig),
    /// Mixtral, Qwen3-MoE.
    Mixtral(MixtralConfig),
    /// GPT-2 and 3.
    Gpt(GptConfig),
    /// DeepSeek-V3, Moonlight.
    #[serde(rename = "deepseek_v3")]
    DeepSeekV3(DeepSeekV3Config),
    /// Mamba-2.
    Mamba2(Mamba2Config),
    /// Nemotron-H.
    #[serde(rename = "nemotron_h")]
    NemotronH(NemotronHConfig),
}

/// An action on a model whose family is known only when the program runs.
pub trait WithModel {
    /// The action's result.
    type Output;

    /// Runs the action with the model type of the family.
    fn with<M: CausalLm + 'static>(self, config: &M::Config) -> Self::Output;
}

impl FamilyConfig {
    /// Calls `action` with the family's model type.
    pub fn visit<A: WithModel>(&self, action: A) -> A::Output {
        match self {
            Self::Llama(config) => action.with::<Llama>(config),
            Self::Mixtral(config) => action.with::<Mixtral>(config),
            Self::Gpt(config) => action.with::<Gpt>(config),
            Self::DeepSeekV3(config) => action.with::<DeepSeekV3>(config),
            Self::Mamba2(config) => action.with::<Mamba2>(config),
            Self::NemotronH(config) => action.with::<NemotronH>(config),
        }
    }

    /// Name of the family.
    pub fn family(&self) -> &'static str {
        match self {
            Self::Llama(_) => "llama",
            Self::Mixtral(_) => "mixtral",
            Self::Gpt(_) => "gpt",
            Self::DeepSeekV3(_) => "deepseek_v3",
            Self::Mamba2(_) => "mamba2",
            Self::NemotronH(_) => "nemotron_h",
        }
    }
}

/// A question that every family answers the same way.
macro_rules! ask {
    ($config:expr, $inner:ident => $answer:expr) => {
        match $config {
            FamilyConfig::Llama($inner) => $answer,
            FamilyConfig::Mixtral($inner) => $answer,
            FamilyConfig::Gpt($inner) => $answer,
            FamilyConfig::DeepSeekV3($inner) => $answer,
            FamilyConfig::Mamba2($inner) => $answer,
            FamilyConfig::NemotronH($inner) => $answer,
        }
    };
}

impl ModelConfig for FamilyConfig {
    fn check(&self) -> Result<(), ConfigError> {
        ask!(self, config => config.check())
    }

    fn dims(&self) -> ModelDims {
        ask!(self, config => config.dims())
    }

    fn cached_positions(&self) -> Option<usize> {
        ask!(self, config => config.cached_positions())
    }

    fn unshared_prefixes(&self) -> Option<UnsharedPrefixes> {
        ask!(self, config => config.unshared_prefixes())
    }

    fn vocab_size(&self) -> usize {
        ask!(self, config => config.vocab_size())
    }

    fn megatron_names(&self) -> NameMap {
        ask!(self, config => config.megatron_names())
    }

    fn hf_names(&self) -> NameMap {
        ask!(self, config => config.hf_names())
    }

    fn presets() -> Vec<(&'static str, Self)> {
        fn of<C: ModelConfig>(family: impl Fn(C) -> FamilyConfig) -> Vec<(&'static str, FamilyConfig)> {
            C::presets().into_iter().map(|(name, config)| (name, family(config))).collect()
        }
        let (llama, mixtral, gpt) = (of(Self::Llama), of(Self::Mixtral), of(Self::Gpt));
        [llama, mixtral, gpt, of(Self::DeepSeekV3), of(Self::Mamba2), of(Self::NemotronH)].concat()
    }

    fn hf_optional_prefix(&self) -> Option<&'static str> {
        ask!(self, config => config.hf_optional_prefix())
    }

    fn hf_is_derived(&self, name: &str) -> bool {
        ask!(self, config => config.hf_is_derived(name))
    }

    fn hf_tied_copy(&self) -> Option<[&'static str; 2]> {
        ask!(self, config => config.hf_tied_copy())
    }

    fn hf_present(self, has: impl Fn(&str) -> bool) -> Self {
        match self {
            Self::Llama(config) => Self::Llama(config.hf_present(has)),
            Self::Mixtral(config) => Self::Mixtral(config.hf_present(has)),
            Self::Gpt(config) => Self::Gpt(config.hf_present(has)),
            Self::DeepSeekV3(config) => Self::DeepSeekV3(config.hf_present(has)),
            Self::Mamba2(config) => Self::Mamba2(config.hf_present(has)),
            Self::NemotronH(config) => Self::NemotronH(config.hf_present(has)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_not_derived() {
        let gpt = FamilyConfig::Gpt(GptConfig::tiny());
        assert!(gpt.hf_is_derived("h.0.attn.bias") && gpt.hf_is_derived("h.11.attn.masked_bias"));
        assert!(!gpt.hf_is_derived("h.0.attn.c_attn.bias") && !gpt.hf_is_derived("h.0.mlp.c_fc.bias"));
        let llama = FamilyConfig::Llama(LlamaConfig::tiny());
        assert!(llama.hf_is_derived("model.layers.3.self_attn.rotary_emb.inv_freq"));
        assert!(!llama.hf_is_derived("model.layers.3.self_attn.q_proj.weight"));
        for config in [gpt, llama] {
            let names = config.hf_names();
            let prefix = config.hf_optional_prefix().unwrap_or_default();
            assert!(names.iter().all(|(_, f)| !config.hf_is_derived(f.name.strip_prefix(prefix).unwrap_or(&f.name))));
        }
    }
}
