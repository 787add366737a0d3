//! A model of a family that is known only when the program runs.

mod about;
mod hf;
mod nearest;
mod registered;
mod sizes;

pub use about::{Family, MegatronExperts, MegatronModel, PrunedSizes, Sample, SampleSizes};

use burn::tensor::FloatDType;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use self::registered::Registered;
use crate::causal_lm::{CausalLm, ModelConfig, UnsharedPrefixes};
use crate::config::ConfigError;
use crate::decoder::Decoder;
use crate::frame::{DecoderConfig, Frame};
use crate::hf::HfError;
use crate::layers::BlockConfig;
use crate::layout::ModelDims;
use crate::names::NameMap;
use crate::{DeepSeekV3Config, GptConfig, LlamaConfig, Mamba2Config, MixtralConfig, NemotronHConfig};

/// The families by their names. `$d` is a dollar sign, for the macro in the macro.
macro_rules! families {
    ($d:tt $($(#[$about:meta])* $family:ident($config:ty) = $name:tt,)*) => {
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
        #[serde(tag = "family")]
        pub enum FamilyConfig {
            $($(#[$about])* #[serde(rename = $name)] $family($config),)*
        }

        $(impl From<$config> for FamilyConfig {
            fn from(config: $config) -> Self {
                Self::$family(config)
            }
        })*

        /// What is asked without a model.
        const FAMILIES: &[Registered] = &[$(Registered::of::<$config>($name)),*];

        impl FamilyConfig {
            /// Name of the family.
            pub fn family(&self) -> &'static str {
                match self {
                    $(Self::$family(_) => $name,)*
                }
            }
        }

        /// A question that every family answers the same way.
        macro_rules! ask {
            ($d of:expr, $d config:ident => $d answer:expr) => {
                match $d of {
                    $(FamilyConfig::$family($d config) => $d answer,)*
                }
            };
        }
    };
}

// A new family is a line here.
families! { $
    /// Llama, Mistral, Qwen, Gemma and other relatives.
    Llama(LlamaConfig) = "llama",
    /// Mixtral, Qwen-MoE, OLMoE, gpt-oss and other relatives.
    Mixtral(MixtralConfig) = "mixtral",
    /// GPT-2 and 3.
    Gpt(GptConfig) = "gpt",
    /// DeepSeek-V3 and V2, Moonlight.
    DeepSeekV3(DeepSeekV3Config) = "deepseek_v3",
    /// Mamba-2.
    Mamba2(Mamba2Config) = "mamba2",
    /// Nemotron-H.
    NemotronH(NemotronHConfig) = "nemotron_h",
}

/// An action on a model whose family is known only when the program runs.
pub trait WithModel {
    /// The action's result.
    type Output;

    /// Runs the action with the model type of the family.
    fn with<M: CausalLm + 'static>(self, config: &M::Config) -> Self::Output;
}

fn run<C: DecoderConfig, A: WithModel>(config: &C, action: A) -> A::Output {
    action.with::<Decoder<C>>(config)
}

impl FamilyConfig {
    /// Calls `action` with the family's model type.
    pub fn visit<A: WithModel>(&self, action: A) -> A::Output {
        ask!(self, config => run(config, action))
    }

    /// The `config.json` of this model, in the form of transformers 5.
    ///
    /// # Errors
    /// If Hugging Face's model cannot say what this one does.
    pub fn to_hf(&self) -> Result<Value, HfError> {
        ask!(self, config => config.write_hf())
    }

    /// Small models of these sizes, of all families: `verify` trains them.
    pub fn samples(sizes: &SampleSizes) -> Vec<Sample<Self>> {
        FAMILIES.iter().flat_map(|family| (family.samples)(sizes)).collect()
    }

    /// The model of Megatron-LM with these arguments, if a family has it.
    pub fn of_megatron(model: &MegatronModel) -> Option<Self> {
        FAMILIES.iter().find_map(|family| (family.of_megatron)(model))
    }

    /// The model that is left when layers go and others become narrower, if weights of the family can be pruned.
    pub fn pruned(&self, to: &PrunedSizes) -> Option<Self> {
        ask!(self, config => config.pruned(to).map(Self::from))
    }

    /// Whether whoever names the family only must give a size, which is `value` in the first preset.
    pub fn is_needed(&self, key: &str, value: &Value) -> bool {
        let is_needed = FAMILIES.iter().any(|family| family.name == self.family() && (family.is_needed)(key, value));
        is_needed && key != "make_vocab_size_divisible_by"
    }
}

impl ModelConfig for FamilyConfig {
    fn check(&self) -> Result<(), ConfigError> {
        ask!(self, config => config.check())
    }

    fn check_dtype(&self, dtype: FloatDType) -> Result<(), ConfigError> {
        ask!(self, config => config.check_dtype(dtype))
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
        FAMILIES.iter().flat_map(|family| (family.presets)()).collect()
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
        ask!(self, config => config.hf_present(has).into())
    }
}

impl DecoderConfig for FamilyConfig {
    fn frame(&self) -> Frame {
        ask!(self, config => config.frame())
    }

    fn block(&self, layer: usize) -> BlockConfig {
        ask!(self, config => config.block(layer))
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
