//! What others know of Mamba-2 by its name.

use serde_json::Value;

use super::config::Mamba2Config;
use super::hf::ARCHITECTURE;
use crate::family::{Family, Sample, SampleSizes};
use crate::hf::{HfArchitecture, HfError};

impl Family for Mamba2Config {
    const SIZES: &'static [(&'static str, &'static str)] = &[
        ("num_heads", "Number of heads"),
        ("state_size", "State dimension, the features of B and of C in a group"),
        ("time_step_limit_min", "Smallest step size"),
        ("residual_in_fp32", "Add residuals in fp32; refused in 16 bits, where they are added in that type"),
        ("time_step_limit_max", "Largest step size; none: no limit"),
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

    /// Heads are twice as wide together as the residual stream. A group has two heads.
    fn samples(sizes: &SampleSizes) -> Vec<Sample<Self>> {
        let config = Self {
            vocab_size: sizes.vocab,
            hidden_size: sizes.hidden,
            num_hidden_layers: sizes.layers,
            num_heads: sizes.heads,
            head_dim: 2 * sizes.hidden / sizes.heads.max(1),
            state_size: 16,
            n_groups: (sizes.heads / 2).max(1),
            use_bias: true,
            time_step_limit_min: 0.002,
            time_step_limit_max: Some(0.09),
            initializer_range: 0.2,
            hidden_dropout: sizes.dropout,
            ..Self::tiny()
        };
        let about = "Mamba-2 layers without MLPs, a group of B and C for every two heads, biases, limited step sizes";
        vec![Sample::new("mamba2", about, config)]
    }
}
