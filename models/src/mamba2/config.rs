//! The sizes of a Mamba-2. Field names are Hugging Face's.

use backend_dist::shard::Init;
use burn::tensor::FloatDType;
use serde::{Deserialize, Serialize};

use crate::causal_lm::ModelConfig;
use crate::config::{ConfigError, divides, expect, not_negative, positive, share, taps};
use crate::frame::{DecoderConfig, Frame};
use crate::hf::backbone;
use crate::layers::{BlockConfig, LinearConfig, Mamba2MixerConfig, Mixer, NormKind, NormPlacement, Vocab};
use crate::layout::{ModelDims, StateDims};
use crate::limits;
use crate::names::NameMap;

/// The sizes of a Mamba-2.
///
/// ```
/// use models::{Mamba2Config, ModelConfig};
///
/// assert_eq!(Mamba2Config::mamba2_130m().parameter_count(), 128_989_632);
/// let refused = Mamba2Config { n_groups: 3, ..Mamba2Config::tiny() }.check().unwrap_err().to_string();
/// assert_eq!(refused, "n_groups = 3 does not divide num_heads = 8; nearest legal: 2, 4");
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Mamba2Config {
    /// Number of tokens.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// Heads of a layer, each with a state.
    pub num_heads: usize,
    /// Features of a head.
    pub head_dim: usize,
    /// Features of B and C in a group: a head's state is `[state_size, head_dim]`.
    pub state_size: usize,
    /// Groups of heads that share B and C, and over whose features the output is normalised.
    pub n_groups: usize,
    /// Positions that the convolution sees.
    pub conv_kernel: usize,
    /// The convolution has a bias.
    pub use_conv_bias: bool,
    /// The projections have biases.
    pub use_bias: bool,
    /// The smallest step size.
    pub time_step_limit_min: f64,
    /// The largest step size; `None` is no limit.
    pub time_step_limit_max: Option<f64>,
    /// Epsilon of the norms.
    pub layer_norm_epsilon: f64,
    /// Residuals are added in fp32 whatever the type of the model. Here they are added in that type, so that such a model is
    /// refused in 16 bits.
    pub residual_in_fp32: bool,
    /// The output layer shares the embedding's weight.
    pub tie_word_embeddings: bool,
    /// Standard deviation of the initial weights; projections onto the residual stream get `std / √layers`, as a layer
    /// has one of them.
    pub initializer_range: f64,
    /// Share of the elements dropped after the embedding and before each residual addition.
    pub hidden_dropout: f64,
    /// The size of every rank's shard of the vocabulary is a multiple of this.
    pub make_vocab_size_divisible_by: usize,
}

/// Steps that are longer at least overflow; published models have steps of 0.001 to 0.1.
const LONGEST_STEP: f64 = 1000.0;

impl Mamba2Config {
    fn init(&self) -> Init {
        Init::Normal { std: self.initializer_range }
    }

    /// The sizes of a layer.
    pub fn mixer(&self) -> Mamba2MixerConfig {
        let residual = Init::Normal { std: self.initializer_range / (self.num_hidden_layers as f64).sqrt() };
        let linear = |init| LinearConfig { bias: self.use_bias, init };
        Mamba2MixerConfig {
            hidden: self.hidden_size,
            heads: self.num_heads,
            head_dim: self.head_dim,
            groups: self.n_groups,
            state: self.state_size,
            kernel: self.conv_kernel,
            conv_bias: self.use_conv_bias,
            step_limit: [self.time_step_limit_min, self.time_step_limit_max.unwrap_or(f64::INFINITY)],
            norm_eps: self.layer_norm_epsilon,
            input: linear(self.init()),
            output: linear(residual),
        }
    }

    fn check_steps(&self) -> Result<(), ConfigError> {
        let low = self.time_step_limit_min;
        not_negative(&[("time_step_limit_min", low)])?;
        expect(low <= LONGEST_STEP, ("time_step_limit_min", low), "from 0 to 1000", LONGEST_STEP)?;
        let Some(high) = self.time_step_limit_max else { return Ok(()) };
        let (range, nearest) = ("finite and above time_step_limit_min", if low > 0.0 { 2.0 * low } else { 1.0 });
        expect(high.is_finite() && high > low, ("time_step_limit_max", high), range, nearest)
    }
}

impl DecoderConfig for Mamba2Config {
    fn frame(&self) -> Frame {
        let vocab =
            Vocab { size: self.vocab_size, hidden: self.hidden_size, divisor: self.make_vocab_size_divisible_by };
        Frame {
            tied: self.tie_word_embeddings,
            dropout: self.hidden_dropout,
            ..Frame::new(vocab, self.num_hidden_layers, self.init(), self.layer_norm_epsilon)
        }
    }

    fn block(&self, _layer: usize) -> BlockConfig {
        BlockConfig {
            mixer: Some(Mixer::Mamba2(self.mixer())),
            mlp: None,
            norm: NormKind::Rms,
            placement: NormPlacement::Before,
            norm_eps: self.layer_norm_epsilon,
            dropout: self.hidden_dropout,
        }
    }
}

impl ModelConfig for Mamba2Config {
    fn check(&self) -> Result<(), ConfigError> {
        limits::sizes(self)?;
        let (layers, hidden) = (("num_hidden_layers", self.num_hidden_layers), ("hidden_size", self.hidden_size));
        let heads = [("num_heads", self.num_heads), ("head_dim", self.head_dim)];
        let groups = [("n_groups", self.n_groups), ("state_size", self.state_size)];
        let (vocab, kernel) = (("vocab_size", self.vocab_size), ("conv_kernel", self.conv_kernel));
        limits::elements(&[vocab, hidden])?;
        for parts in [heads, groups] {
            limits::elements(&[[layers, hidden], parts].concat())?;
            limits::elements(&[[layers, kernel], parts].concat())?;
        }
        let multiple = ("make_vocab_size_divisible_by", self.make_vocab_size_divisible_by);
        positive(&[&[vocab, multiple, hidden, layers][..], &heads, &groups].concat())?;
        divides("n_groups", self.n_groups, "num_heads", self.num_heads)?;
        taps("conv_kernel", self.conv_kernel)?;
        self.check_steps()?;
        let numbers = [("layer_norm_epsilon", self.layer_norm_epsilon), ("initializer_range", self.initializer_range)];
        not_negative(&numbers)?;
        share("hidden_dropout", self.hidden_dropout)
    }

    fn check_dtype(&self, dtype: FloatDType) -> Result<(), ConfigError> {
        let is_short = matches!(dtype, FloatDType::BF16 | FloatDType::F16);
        if self.residual_in_fp32 && is_short { Err(ConfigError::Residuals { dtype }) } else { Ok(()) }
    }

    fn dims(&self) -> ModelDims {
        ModelDims {
            vocab: self.vocab_size,
            hidden: self.hidden_size,
            heads: self.num_heads,
            kv_heads: self.num_heads,
            intermediate: 0,
            experts: None,
            layers: self.num_hidden_layers,
            max_positions: None,
            states: Some(StateDims::mamba2(self.num_heads, self.n_groups)),
        }
    }

    fn megatron_names(&self) -> NameMap {
        self.frame().megatron_names(|layer| self.block(layer))
    }

    fn hf_names(&self) -> NameMap {
        backbone::names(&self.frame(), |layer| self.block(layer))
    }

    fn presets() -> Vec<(&'static str, Self)> {
        Self::by_name()
    }

    fn hf_tied_copy(&self) -> Option<[&'static str; 2]> {
        self.tie_word_embeddings.then_some(["lm_head.weight", "backbone.embeddings.weight"])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn residuals_in_fp32_are_refused_in_16_bits() {
        let model = Mamba2Config { residual_in_fp32: true, ..Mamba2Config::tiny() };
        let said = model.check_dtype(FloatDType::BF16).unwrap_err().to_string();
        assert!(said.starts_with("residual_in_fp32 = true: in bf16 residuals are added in bf16"), "{said}");
        assert_eq!(model.check_dtype(FloatDType::F32), Ok(()));
        assert_eq!(Mamba2Config::tiny().check_dtype(FloatDType::F16), Ok(()));
    }

    #[test]
    fn contradictory_sizes_are_refused() {
        let refuse = |config: Mamba2Config| config.check().unwrap_err().to_string();
        let tiny = Mamba2Config::tiny;
        assert_eq!(
            refuse(Mamba2Config { state_size: 0, ..tiny() }),
            "state_size = 0 is not positive; nearest legal: 1"
        );
        assert_eq!(
            refuse(Mamba2Config { time_step_limit_min: 0.5, time_step_limit_max: Some(0.1), ..tiny() }),
            "time_step_limit_max = 0.1 is not finite and above time_step_limit_min; nearest legal: 1"
        );
        assert_eq!(
            refuse(Mamba2Config { time_step_limit_min: 1e5, ..tiny() }),
            "time_step_limit_min = 100000 is not from 0 to 1000; nearest legal: 1000"
        );
        assert!(refuse(Mamba2Config { time_step_limit_min: f64::NAN, ..tiny() }).starts_with("time_step_limit_min"));
        assert_eq!(
            refuse(Mamba2Config { conv_kernel: 1, ..tiny() }),
            "conv_kernel = 1 is not at least 2; nearest legal: 2"
        );
        assert!(refuse(Mamba2Config { conv_kernel: 1 << 20, ..tiny() }).contains("nearest legal: 65536"));
        for (_, config) in Mamba2Config::presets() {
            assert_eq!(config.check(), Ok(()));
        }
    }
}
