//! The largest sizes of a model. They are checked before anything is computed from them: a list of tensors fits into
//! memory, and the product of sizes does not overflow.

use serde::Serialize;
use serde_json::Value;

use crate::config::ConfigError;
use crate::hf::keys;

/// Layers of a model.
const LAYERS: u64 = 1 << 12;
/// Experts of a layer.
const EXPERTS: u64 = 1 << 14;
/// Experts of all layers, each of which has tensors of its own: ten times those of DeepSeek-V3.
const ALL_EXPERTS: u64 = 1 << 18;
/// Heads, and features of a head.
const HEADS: u64 = 1 << 16;
/// What the vocabulary is padded to a multiple of.
const MULTIPLE: u64 = 1 << 20;
/// Any other size.
const LARGEST: u64 = 1 << 32;
/// Elements of one kind of matrix in all layers.
const ELEMENTS: u64 = 1 << 48;
/// Matrix rows that another system has in another order, in all layers: 33 times those of DeepSeek-V3.
const REORDERED: u64 = 1 << 24;

/// The largest value of a size, by its key in our configurations or in a `config.json`.
pub fn limit(key: &str) -> u64 {
    match key {
        key if OF_LAYERS.contains(&key) => LAYERS,
        key if OF_EXPERTS.contains(&key) => EXPERTS,
        key if OF_HEADS.contains(&key) => HEADS,
        "make_vocab_size_divisible_by" => MULTIPLE,
        _ => LARGEST,
    }
}

const OF_LAYERS: [&str; 7] = keys![
    "num_hidden_layers" "n_layer" "num_nextn_predict_layers" "first_k_dense_replace" "decoder_sparse_step"
    "full_attention_interval" "mlp_only_layers"
];
const OF_EXPERTS: [&str; 7] = keys![
    "num_experts" "num_local_experts" "n_routed_experts" "n_shared_experts" "num_experts_per_tok" "n_group" "topk_group"
];
const OF_HEADS: [&str; 20] = keys![
    "num_attention_heads" "n_head" "num_key_value_heads" "head_dim" "qk_head_dim" "qk_nope_head_dim" "qk_rope_head_dim"
    "v_head_dim" "linear_num_key_heads" "linear_num_value_heads" "linear_key_head_dim" "linear_value_head_dim"
    "linear_conv_kernel_dim" "num_heads" "state_size" "mamba_num_heads" "mamba_head_dim" "ssm_state_size" "n_groups"
    "conv_kernel"
];

/// Whether each whole number of a configuration is within its limit.
///
/// # Errors
/// Names the key, its value and the limit.
pub(crate) fn sizes(config: &impl Serialize) -> Result<(), ConfigError> {
    let fields = serde_json::to_value(config).unwrap_or_default();
    fields.as_object().into_iter().flatten().try_for_each(|(key, value)| within(key, value))
}

fn within(key: &str, value: &Value) -> Result<(), ConfigError> {
    let most = limit(key);
    let compare = |value: u64| {
        if value <= most { Ok(()) } else { Err(ConfigError::TooLarge { key: key.into(), value, most }) }
    };
    match value {
        Value::Array(list) => {
            compare(list.len() as u64)?;
            list.iter().try_for_each(|value| within(key, value))
        }
        Value::Object(fields) => fields.iter().try_for_each(|(key, value)| within(key, value)),
        value => value.as_u64().map_or(Ok(()), compare),
    }
}

/// Sizes by their keys.
pub(crate) type Named<'a> = &'a [(&'static str, usize)];

/// Whether the matrices of one kind, of these sizes, have a number of elements that can be counted.
pub(crate) fn elements(sizes: Named) -> Result<(), ConfigError> {
    count("elements", sizes, ELEMENTS)
}

/// Whether there are few enough experts in all layers.
pub(crate) fn experts(sizes: Named) -> Result<(), ConfigError> {
    count("experts", sizes, ALL_EXPERTS)
}

/// Whether few enough matrix rows are in another order elsewhere.
pub(crate) fn reordered(sizes: Named) -> Result<(), ConfigError> {
    count("matrix rows in another order", sizes, REORDERED)
}

fn count(what: &'static str, sizes: Named, most: u64) -> Result<(), ConfigError> {
    let total = sizes.iter().map(|(_, size)| *size as f64).product::<f64>();
    if total <= most as f64 {
        return Ok(());
    }
    let sizes = sizes.iter().map(|(key, size)| format!("{key} = {size}")).collect::<Vec<_>>().join(", ");
    Err(ConfigError::TooMany { sizes, count: total, what, most })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DeepSeekV3Config, LlamaConfig, MixtralConfig, MixtralVariant, ModelConfig};

    #[test]
    fn sizes_beyond_their_limits_are_refused_by_name() {
        let refuse = |config: &dyn Fn() -> Result<(), ConfigError>| config().unwrap_err().to_string();
        let llama = |change: &dyn Fn(&mut LlamaConfig)| {
            let mut config = LlamaConfig::tiny();
            change(&mut config);
            config.check()
        };
        assert_eq!(
            refuse(&|| llama(&|config| config.num_hidden_layers = 1 << 31)),
            "num_hidden_layers = 2147483648 is more than this program can hold; nearest legal: 4096"
        );
        assert!(refuse(&|| llama(&|config| config.make_vocab_size_divisible_by = 1 << 32)).contains("1048576"));
        assert_eq!(
            refuse(&|| llama(&|config| (config.vocab_size, config.hidden_size) = (1 << 32, 1 << 20))),
            "vocab_size = 4294967296, hidden_size = 1048576 make 4.5e15 elements, more than 281474976710656; take smaller \
             sizes"
        );
        let deepseek =
            DeepSeekV3Config { num_hidden_layers: 4096, n_routed_experts: 1 << 13, ..DeepSeekV3Config::tiny() };
        assert!(refuse(&|| deepseek.check()).contains("n_routed_experts = 8192 make 3.4e7 experts, more than 262144"));
        let rows =
            DeepSeekV3Config { num_hidden_layers: 4096, num_attention_heads: 1 << 12, ..DeepSeekV3Config::tiny() };
        assert!(refuse(&|| rows.check()).contains("matrix rows in another order, more than 16777216"));
        let listed = MixtralConfig {
            variant: MixtralVariant::Qwen3Moe,
            mlp_only_layers: (0..5000).collect(),
            ..MixtralConfig::tiny()
        };
        assert!(refuse(&|| listed.check()).starts_with("mlp_only_layers = 5000 is more than"));
    }
}
