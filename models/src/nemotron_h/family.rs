//! What others know of Nemotron-H by its name.

use serde_json::Value;

use super::config::NemotronHConfig;
use super::hf::ARCHITECTURE;
use crate::family::{Family, Sample, SampleSizes};
use crate::hf::{HfArchitecture, HfError};

impl Family for NemotronHConfig {
    const SIZES: &'static [(&'static str, &'static str)] = &[
        ("hybrid_override_pattern", "Layers, a character each: M (Mamba-2), * (attention), - (MLP), E (experts)"),
        ("mamba_num_heads", "Mamba-2: number of heads"),
        ("mamba_head_dim", "Mamba-2: head dimension"),
        ("ssm_state_size", "Mamba-2: state dimension, the features of B and of C in a group"),
        ("moe_shared_expert_intermediate_size", "Intermediate size of the shared expert"),
    ];

    fn architectures() -> Vec<HfArchitecture> {
        vec![ARCHITECTURE]
    }

    fn read_hf(config: &Value, _kind: &str) -> Result<Self, HfError> {
        Self::from_hf(config)
    }

    fn write_hf(&self) -> Result<Value, HfError> {
        Ok(self.to_hf())
    }

    /// The pattern is what other families have as a number of layers.
    fn is_needed(key: &str, value: &Value) -> bool {
        value.is_u64() || key == "hybrid_override_pattern"
    }

    fn samples(sizes: &SampleSizes) -> Vec<Sample<Self>> {
        vec![
            Sample::new(
                "nemotron-h",
                "Mamba-2 and attention without positions in turn, each followed by an MLP with squared ReLU, all of them \
                 layers of their own; a group of B and C for every two heads",
                nemotron_h(sizes),
            ),
            Sample::new(
                "nemotron-3",
                "The same with experts in the place of every second MLP: eight in four groups, chosen by sigmoid scores and \
                 a bias, and a shared one",
                nemotron_3(sizes),
            ),
        ]
    }
}

/// A layer of the other families is two, a mixer and an MLP. Heads of Mamba-2 are as many as of attention.
fn nemotron_h(sizes: &SampleSizes) -> NemotronHConfig {
    let head_dim = sizes.head_dim();
    NemotronHConfig {
        vocab_size: sizes.vocab,
        hidden_size: sizes.hidden,
        hybrid_override_pattern: "M-*-".chars().cycle().take(2 * sizes.layers).collect(),
        num_attention_heads: sizes.heads,
        num_key_value_heads: sizes.kv_heads,
        head_dim,
        intermediate_size: sizes.intermediate,
        mamba_num_heads: sizes.heads,
        mamba_head_dim: 2 * head_dim,
        n_groups: (sizes.heads / 2).max(1),
        initializer_range: 0.2,
        hidden_dropout: sizes.dropout,
        attention_dropout: sizes.dropout,
        ..NemotronHConfig::tiny()
    }
}

fn nemotron_3(sizes: &SampleSizes) -> NemotronHConfig {
    NemotronHConfig {
        hybrid_override_pattern: "M-*EME*E".chars().cycle().take(2 * sizes.layers).collect(),
        moe_intermediate_size: sizes.intermediate / 2,
        moe_shared_expert_intermediate_size: sizes.intermediate / 2,
        moe_router_bias_update_rate: 0.01,
        router_aux_loss_coef: 0.01,
        ..nemotron_h(sizes)
    }
}
