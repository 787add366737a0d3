//! The sizes of a Nemotron-H. Field names are Hugging Face's.

use serde::{Deserialize, Serialize};

use crate::causal_lm::{ModelConfig, UnsharedPrefixes};
use crate::config::{ConfigError, common_divisor, divides, expect, factors, not_negative, positive, share, taps};
use crate::frame::DecoderConfig;
use crate::hf::backbone;
use crate::layers::{BalanceOver, Capacity, Dispatcher};
use crate::layout::{ExpertDims, ModelDims, StateDims};
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
    /// `E`: experts, each such an MLP, and a shared one.
    Moe,
}

/// The sizes of a Nemotron-H (arXiv 2504.03624), with experts those of a Nemotron 3.
///
/// ```
/// use models::{ModelConfig, NemotronHConfig};
///
/// assert_eq!(NemotronHConfig::nemotron_h_8b().parameter_count(), 8_100_852_736);
/// let refused = NemotronHConfig { hybrid_override_pattern: "MO*".into(), ..NemotronHConfig::tiny() };
/// assert_eq!(
///     refused.check().unwrap_err().to_string(),
///     "hybrid_override_pattern = MO*: layer 1 is `O`; legal: M (Mamba-2), * (attention), - (MLP), E (experts)"
/// );
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NemotronHConfig {
    /// Number of tokens.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// The layers, a character each: `M` is Mamba-2, `*` attention, `-` an MLP, `E` experts.
    pub hybrid_override_pattern: String,
    /// Query heads of attention.
    pub num_attention_heads: usize,
    /// Key-value heads of attention.
    pub num_key_value_heads: usize,
    /// Features of an attention head.
    pub head_dim: usize,
    /// Width of the MLPs.
    pub intermediate_size: usize,
    /// Width of an expert.
    pub moe_intermediate_size: usize,
    /// Width of the shared expert, which all tokens use.
    pub moe_shared_expert_intermediate_size: usize,
    /// Routed experts of a layer.
    pub n_routed_experts: usize,
    /// Experts that a token uses.
    pub num_experts_per_tok: usize,
    /// Groups of neighbouring experts.
    pub n_group: usize,
    /// Groups that a token may use.
    pub topk_group: usize,
    /// The scores of a token's experts are brought to a sum of one.
    pub norm_topk_prob: bool,
    /// The factor of the scores.
    pub routed_scaling_factor: f64,
    /// How much a step moves the bias that experts are chosen by (`--moe-router-bias-update-rate`).
    pub moe_router_bias_update_rate: f64,
    /// Coefficient of the load-balancing loss of each layer with experts (`--moe-aux-loss-coeff`).
    pub router_aux_loss_coef: f64,
    /// Over which tokens the load is balanced (`--moe-router-load-balancing-type`).
    pub router_balance: BalanceOver,
    /// The most tokens that an expert takes (`--moe-expert-capacity-factor`); without it nothing is dropped.
    pub moe_capacity: Option<Capacity>,
    /// How tokens are dispatched to the ranks of their experts (`--moe-token-dispatcher-type`).
    pub moe_dispatcher: Dispatcher,
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
            b'E' => HybridLayer::Moe,
            _ => HybridLayer::Mlp,
        }
    }

    /// Whether the pattern, of whatever characters, has layers with experts: without them their sizes mean nothing.
    pub fn has_experts(&self) -> bool {
        self.hybrid_override_pattern.contains('E')
    }

    /// The layers of a kind.
    pub fn layers_of(&self, kind: HybridLayer) -> Vec<usize> {
        (0..self.num_hidden_layers()).filter(|layer| self.kind(*layer) == kind).collect()
    }

    fn check_pattern(&self) -> Result<(), ConfigError> {
        let (key, pattern) = ("hybrid_override_pattern", &self.hybrid_override_pattern);
        let most = limits::limit("num_hidden_layers");
        if pattern.len() as u64 > most {
            return Err(ConfigError::TooLarge { key: format!("layers of {key}"), value: pattern.len() as u64, most });
        }
        match pattern.chars().enumerate().find(|(_, kind)| !matches!(kind, 'M' | '*' | '-' | 'E')) {
            Some((layer, found)) => Err(ConfigError::Pattern { key, pattern: pattern.clone(), layer, found }),
            None => positive(&[(key, pattern.len())]),
        }
    }

    /// The sizes of the experts, if there are any.
    fn check_experts(&self) -> Result<(), ConfigError> {
        if !self.has_experts() {
            return Ok(());
        }
        let (layers, experts) = (self.layers_of(HybridLayer::Moe).len(), self.n_routed_experts);
        let (layers, count) = (("num_hidden_layers", layers), ("n_routed_experts", experts));
        let width = ("moe_intermediate_size", self.moe_intermediate_size);
        let shared = ("moe_shared_expert_intermediate_size", self.moe_shared_expert_intermediate_size);
        limits::experts(&[layers, count])?;
        limits::elements(&[layers, ("hidden_size", self.hidden_size), width, count])?;
        limits::elements(&[layers, ("hidden_size", self.hidden_size), shared])?;
        positive(&[count, shared, ("n_group", self.n_group), ("topk_group", self.topk_group)])?;
        divides("n_group", self.n_group, "n_routed_experts", experts)?;
        let (groups, top_k) = (self.n_group, self.topk_group);
        expect(top_k <= groups, ("topk_group", top_k as f64), "at most n_group", groups as f64)?;
        let (per_token, most) = (self.num_experts_per_tok, experts as f64);
        let chosen = ("num_experts_per_tok", per_token as f64);
        expect(per_token <= experts, chosen, "at most n_routed_experts", most)?;
        let biases = ("mlp_bias", f64::from(u8::from(self.mlp_bias)));
        expect(!self.mlp_bias, biases, "0 next to experts, which have no biases", 0.0)?;
        factors(&[("routed_scaling_factor", self.routed_scaling_factor)])?;
        not_negative(&[("moe_router_bias_update_rate", self.moe_router_bias_update_rate)])?;
        self.moe().check()
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
        share("attention_dropout", self.attention_dropout)?;
        self.check_experts()
    }

    fn dims(&self) -> ModelDims {
        let has = |kind: HybridLayer| !self.layers_of(kind).is_empty();
        let mlp = if has(HybridLayer::Mlp) { self.intermediate_size } else { 0 };
        // Ranks divide the MLPs and the shared expert.
        let shared = if has(HybridLayer::Moe) { self.moe_shared_expert_intermediate_size } else { 0 };
        let experts = ExpertDims { count: self.n_routed_experts, intermediate: self.moe_intermediate_size };
        let intermediate = common_divisor(mlp, shared);
        // Without attention, ranks divide the heads of the other layers.
        let [heads, kv_heads] = match [HybridLayer::Attention, HybridLayer::Mamba2].map(has) {
            [true, _] => [self.num_attention_heads, self.num_key_value_heads],
            [false, true] => [self.mamba_num_heads; 2],
            [false, false] => [intermediate; 2],
        };
        ModelDims {
            vocab: self.vocab_size,
            hidden: self.hidden_size,
            heads,
            kv_heads,
            intermediate,
            experts: has(HybridLayer::Moe).then_some(experts),
            layers: self.num_hidden_layers(),
            max_positions: None,
            states: has(HybridLayer::Mamba2).then(|| StateDims::mamba2(self.mamba_num_heads, self.n_groups)),
        }
    }

    fn unshared_prefixes(&self) -> Option<UnsharedPrefixes> {
        let capacity = self.moe_capacity.filter(|_| self.has_experts());
        self.dims().states.map(|_| UnsharedPrefixes::States).or(capacity.map(|_| UnsharedPrefixes::Capacity))
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

    /// Modules of multi-token prediction are not read.
    fn hf_is_derived(&self, name: &str) -> bool {
        name.starts_with("mtp.")
    }

    fn hf_tied_copy(&self) -> Option<[&'static str; 2]> {
        self.tie_word_embeddings.then_some(["lm_head.weight", "backbone.embeddings.weight"])
    }
}

#[cfg(test)]
mod tests;
