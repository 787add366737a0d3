//! The sizes of a Nemotron-H. Field names are Hugging Face's.

use backend_dist::shard::Init;
use serde::{Deserialize, Serialize};

use crate::causal_lm::ModelConfig;
use crate::config::{ConfigError, divides, not_negative, positive, share, taps};
use crate::frame::{DecoderConfig, Frame};
use crate::hf::backbone;
use crate::layers::{
    Activation, AttentionConfig, BlockConfig, Ffn, LinearConfig, Mamba2MixerConfig, Mixer, MlpConfig, NormKind,
    NormPlacement, Vocab,
};
use crate::layout::{ModelDims, StateDims};
use crate::limits;
use crate::names::NameMap;

/// What a layer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HybridLayer {
    /// `M`: Mamba-2.
    Mamba2,
    /// `*`: attention without positions.
    Attention,
    /// `-`: an MLP with squared ReLU.
    Mlp,
}

/// The sizes of a Nemotron-H (arXiv 2504.03624).
///
/// ```
/// use models::{ModelConfig, NemotronHConfig};
///
/// assert_eq!(NemotronHConfig::nemotron_h_8b().parameter_count(), 8_100_852_736);
/// let refused = NemotronHConfig { hybrid_override_pattern: "ME*".into(), ..NemotronHConfig::tiny() };
/// assert_eq!(
///     refused.check().unwrap_err().to_string(),
///     "hybrid_override_pattern = ME*: layer 1 is `E`; legal: M (Mamba-2), * (attention), - (MLP)"
/// );
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NemotronHConfig {
    /// Number of tokens.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// The layers, a character each: `M` is Mamba-2, `*` attention, `-` an MLP.
    pub hybrid_override_pattern: String,
    /// Query heads of attention.
    pub num_attention_heads: usize,
    /// Key-value heads of attention.
    pub num_key_value_heads: usize,
    /// Features of an attention head.
    pub head_dim: usize,
    /// Width of the MLPs.
    pub intermediate_size: usize,
    /// Heads of a Mamba-2 layer, each with a state.
    pub mamba_num_heads: usize,
    /// Features of a Mamba-2 head.
    pub mamba_head_dim: usize,
    /// Features of B and C in a group: a head's state is `[ssm_state_size, mamba_head_dim]`.
    pub ssm_state_size: usize,
    /// Groups of heads that share B and C, and over whose features the output is normalised.
    pub n_groups: usize,
    /// Positions that the convolution sees.
    pub conv_kernel: usize,
    /// The convolution has a bias.
    pub use_conv_bias: bool,
    /// The projections of Mamba-2 layers have biases.
    pub use_bias: bool,
    /// The MLPs' linear layers have biases.
    pub mlp_bias: bool,
    /// Longest sequence that the model was made for.
    pub max_position_embeddings: usize,
    /// Epsilon of the norms.
    pub layer_norm_epsilon: f64,
    /// The output layer shares the embedding's weight.
    pub tie_word_embeddings: bool,
    /// Standard deviation of the initial weights; projections onto the residual stream get `std / √layers`, as a layer
    /// has one of them.
    pub initializer_range: f64,
    /// Share of the elements dropped after the embedding and before each residual addition.
    pub hidden_dropout: f64,
    /// Share of the attention weights dropped after the softmax.
    pub attention_dropout: f64,
    /// The size of every rank's shard of the vocabulary is a multiple of this.
    pub make_vocab_size_divisible_by: usize,
}

impl NemotronHConfig {
    /// Number of layers.
    pub fn num_hidden_layers(&self) -> usize {
        self.hybrid_override_pattern.len()
    }

    /// What a layer is, in a pattern that was checked.
    ///
    /// # Panics
    /// If the pattern is shorter.
    pub fn kind(&self, layer: usize) -> HybridLayer {
        match self.hybrid_override_pattern.as_bytes()[layer] {
            b'M' => HybridLayer::Mamba2,
            b'*' => HybridLayer::Attention,
            _ => HybridLayer::Mlp,
        }
    }

    /// The layers of a kind.
    pub fn layers_of(&self, kind: HybridLayer) -> Vec<usize> {
        (0..self.num_hidden_layers()).filter(|layer| self.kind(*layer) == kind).collect()
    }

    fn init(&self) -> Init {
        Init::Normal { std: self.initializer_range }
    }

    fn linears(&self, bias: bool) -> [LinearConfig; 2] {
        let residual = Init::Normal { std: self.initializer_range / (self.num_hidden_layers() as f64).sqrt() };
        [self.init(), residual].map(|init| LinearConfig { bias, init })
    }

    /// The sizes of a Mamba-2 layer. As in Megatron-LM, step sizes have no limits.
    fn mamba2(&self) -> Mamba2MixerConfig {
        let [input, output] = self.linears(self.use_bias);
        Mamba2MixerConfig {
            hidden: self.hidden_size,
            heads: self.mamba_num_heads,
            head_dim: self.mamba_head_dim,
            groups: self.n_groups,
            state: self.ssm_state_size,
            kernel: self.conv_kernel,
            conv_bias: self.use_conv_bias,
            step_limit: [0.0, f64::INFINITY],
            norm_eps: self.layer_norm_epsilon,
            input,
            output,
        }
    }

    fn attention(&self) -> AttentionConfig {
        let heads = [self.num_attention_heads, self.num_key_value_heads];
        let attention = AttentionConfig::new(self.hidden_size, heads, self.head_dim, self.linears(false));
        AttentionConfig { dropout: self.attention_dropout, ..attention }
    }

    fn mlp(&self) -> MlpConfig {
        let [input, output] = self.linears(self.mlp_bias);
        MlpConfig {
            hidden: self.hidden_size,
            intermediate: self.intermediate_size,
            activation: Activation::SquaredRelu,
            input,
            output,
        }
    }

    fn check_pattern(&self) -> Result<(), ConfigError> {
        let (key, pattern) = ("hybrid_override_pattern", &self.hybrid_override_pattern);
        let most = limits::limit("num_hidden_layers");
        if pattern.len() as u64 > most {
            return Err(ConfigError::TooLarge { key: format!("layers of {key}"), value: pattern.len() as u64, most });
        }
        match pattern.chars().enumerate().find(|(_, kind)| !matches!(kind, 'M' | '*' | '-')) {
            Some((layer, found)) => Err(ConfigError::Pattern { key, pattern: pattern.clone(), layer, found }),
            None => positive(&[(key, pattern.len())]),
        }
    }
}

impl DecoderConfig for NemotronHConfig {
    fn frame(&self) -> Frame {
        let vocab =
            Vocab { size: self.vocab_size, hidden: self.hidden_size, divisor: self.make_vocab_size_divisible_by };
        Frame {
            tied: self.tie_word_embeddings,
            dropout: self.hidden_dropout,
            ..Frame::new(vocab, self.num_hidden_layers(), self.init(), self.layer_norm_epsilon)
        }
    }

    fn block(&self, layer: usize) -> BlockConfig {
        let (mixer, mlp) = match self.kind(layer) {
            HybridLayer::Mamba2 => (Some(Mixer::Mamba2(self.mamba2())), None),
            HybridLayer::Attention => (Some(Mixer::Attention(self.attention())), None),
            HybridLayer::Mlp => (None, Some(Ffn::Dense(self.mlp()))),
        };
        BlockConfig {
            mixer,
            mlp,
            norm: NormKind::Rms,
            placement: NormPlacement::Before,
            norm_eps: self.layer_norm_epsilon,
            dropout: self.hidden_dropout,
        }
    }
}

impl ModelConfig for NemotronHConfig {
    fn check(&self) -> Result<(), ConfigError> {
        limits::sizes(self)?;
        self.check_pattern()?;
        let layers = ("num_hidden_layers", self.num_hidden_layers());
        let (vocab, hidden) = (("vocab_size", self.vocab_size), ("hidden_size", self.hidden_size));
        let width = ("intermediate_size", self.intermediate_size);
        let attention = [("num_attention_heads", self.num_attention_heads), ("head_dim", self.head_dim)];
        let heads = [("mamba_num_heads", self.mamba_num_heads), ("mamba_head_dim", self.mamba_head_dim)];
        let groups = [("n_groups", self.n_groups), ("ssm_state_size", self.ssm_state_size)];
        limits::elements(&[vocab, hidden])?;
        limits::elements(&[layers, hidden, width])?;
        for parts in [attention, heads, groups] {
            limits::elements(&[[layers, hidden], parts].concat())?;
            limits::elements(&[[layers, ("conv_kernel", self.conv_kernel)], parts].concat())?;
        }
        let multiple = ("make_vocab_size_divisible_by", self.make_vocab_size_divisible_by);
        let positions = ("max_position_embeddings", self.max_position_embeddings);
        positive(&[&[vocab, multiple, hidden, width, positions][..], &attention, &heads, &groups].concat())?;
        divides("num_key_value_heads", self.num_key_value_heads, "num_attention_heads", self.num_attention_heads)?;
        divides("n_groups", self.n_groups, "mamba_num_heads", self.mamba_num_heads)?;
        taps("conv_kernel", self.conv_kernel)?;
        let numbers = [("layer_norm_epsilon", self.layer_norm_epsilon), ("initializer_range", self.initializer_range)];
        not_negative(&numbers)?;
        share("hidden_dropout", self.hidden_dropout)?;
        share("attention_dropout", self.attention_dropout)
    }

    fn dims(&self) -> ModelDims {
        let has = |kind: HybridLayer| !self.layers_of(kind).is_empty();
        ModelDims {
            vocab: self.vocab_size,
            hidden: self.hidden_size,
            heads: self.num_attention_heads,
            kv_heads: self.num_key_value_heads,
            intermediate: if has(HybridLayer::Mlp) { self.intermediate_size } else { 0 },
            experts: None,
            layers: self.num_hidden_layers(),
            max_positions: None,
            states: has(HybridLayer::Mamba2).then(|| StateDims::mamba2(self.mamba_num_heads, self.n_groups)),
        }
    }

    /// Of sizes that nobody has checked too: [`dims`](ModelConfig::dims) goes through all layers.
    fn vocab_size(&self) -> usize {
        self.vocab_size
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
    fn contradictory_sizes_are_refused() {
        let refuse = |config: NemotronHConfig| config.check().unwrap_err().to_string();
        let tiny = NemotronHConfig::tiny;
        let pattern = |pattern: &str| NemotronHConfig { hybrid_override_pattern: pattern.into(), ..tiny() };
        assert!(refuse(pattern("")).contains("hybrid_override_pattern = 0 is not positive"));
        assert!(refuse(pattern("M é")).contains("layer 1 is ` `; legal: M (Mamba-2), * (attention), - (MLP)"));
        assert!(refuse(pattern(&"M".repeat(5000))).contains("nearest legal: 4096"));
        assert_eq!(
            refuse(NemotronHConfig { n_groups: 3, ..tiny() }),
            "n_groups = 3 does not divide mamba_num_heads = 8; nearest legal: 2, 4"
        );
        assert_eq!(
            refuse(NemotronHConfig { num_key_value_heads: 3, ..tiny() }),
            "num_key_value_heads = 3 does not divide num_attention_heads = 8; nearest legal: 2, 4"
        );
        assert!(refuse(NemotronHConfig { ssm_state_size: 0, ..tiny() }).contains("nearest legal: 1"));
        for (_, config) in NemotronHConfig::presets() {
            assert_eq!(config.check(), Ok(()));
        }
    }

    #[test]
    fn sizes_of_kinds_that_the_pattern_lacks_divide_nothing() {
        let of = |pattern: &str| NemotronHConfig { hybrid_override_pattern: pattern.into(), ..NemotronHConfig::tiny() };
        let dims = of("M*").dims();
        assert_eq!((dims.layers, dims.intermediate, dims.states.is_some()), (2, 0, true));
        // Attention alone has no states, so any number of ranks may share sequences.
        assert!(of("M*").dims().check_cp(1, 3).is_err());
        assert_eq!(of("*-*-").dims().check_cp(1, 3), Ok(()));
    }
}
