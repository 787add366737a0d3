//! What an MoE layer is made of. Plain data.

mod router;

use backend_dist::ops::moe::ExpertActivation;
use backend_dist::shard::Init;
use serde::{Deserialize, Serialize};

use crate::config::{ConfigError, divides, expect, not_negative, positive};
use crate::layers::mlp::{Activation, MlpConfig};

pub use router::{Balance, BalanceOver, ExpertGroups, RouterConfig, RouterDevice, Scores};

/// The feed-forward part of a block.
#[derive(Clone, Copy, Debug)]
pub enum Ffn {
    /// One MLP for all tokens.
    Dense(MlpConfig),
    /// Experts, of which each token uses some.
    Moe(MoeConfig),
}

impl Ffn {
    /// Features in and out.
    pub fn hidden(&self) -> usize {
        match self {
            Self::Dense(mlp) => mlp.hidden,
            Self::Moe(moe) => moe.hidden,
        }
    }
}

/// What experts compute.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum ExpertKind {
    /// SwiGLU MLPs without biases.
    #[default]
    SwiGlu,
    /// MLPs with squared ReLU, without gates and biases (Nemotron 3).
    SquaredRelu,
    /// `(up + 1) gate σ(alpha gate)` of a gate of at most `limit` and an up within `±limit`; all linear layers and the
    /// router have biases (gpt-oss).
    Clamped {
        /// Factor of the gate inside the sigmoid.
        alpha: f64,
        /// Bound of the gate, and of up with either sign.
        limit: f64,
    },
}

impl ExpertKind {
    /// Whether experts and router have biases.
    pub fn has_biases(self) -> bool {
        matches!(self, Self::Clamped { .. })
    }

    /// Whether an expert has a gate next to its up matrix.
    pub fn is_gated(self) -> bool {
        self != Self::SquaredRelu
    }

    /// The activation of an MLP that computes as an expert without biases does.
    pub fn activation(self) -> Activation {
        if self.is_gated() { Activation::SwiGlu } else { Activation::SquaredRelu }
    }

    /// The same between the two layers of the experts.
    pub(super) fn between(self) -> ExpertActivation {
        if self.is_gated() { ExpertActivation::SwiGlu } else { ExpertActivation::SquaredRelu }
    }

    /// Our names of the first layer's matrices.
    pub fn first(self) -> &'static [&'static str] {
        if self.is_gated() { &["gate", "up"] } else { &["up"] }
    }
}

/// Sizes of an MoE layer.
#[derive(Clone, Copy, Debug)]
pub struct MoeConfig {
    /// Features in and out.
    pub hidden: usize,
    /// Features of an expert after its activation.
    pub intermediate: usize,
    /// Number of experts.
    pub experts: usize,
    /// What they compute.
    pub kind: ExpertKind,
    /// Which experts a token uses, and how much.
    pub router: RouterConfig,
    /// The most tokens that an expert takes; without it nothing is dropped.
    pub capacity: Option<Capacity>,
    /// How tokens are dispatched to the ranks of their experts.
    pub dispatcher: Dispatcher,
    /// Shared experts: an MLP that all tokens use.
    pub shared: Option<SharedExperts>,
    /// Distribution of the router's weight and of the first layers' weights.
    pub input: Init,
    /// Distribution of the weights of layers whose output is added to the residual stream.
    pub output: Init,
}

/// The most tokens that an expert takes from a rank: `ceil(tokens · top_k / experts · factor)`. The tokens are those of
/// one rank, so what is dropped depends on the layout, as in Megatron-LM.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Capacity {
    /// How much more than its even share an expert takes.
    pub factor: f64,
    /// Which tokens are dropped.
    pub policy: DropPolicy,
    /// Experts with fewer tokens are padded to the capacity, with tokens that only Megatron's expert bias counts.
    pub pad: bool,
}

/// Which tokens an expert drops (Megatron's `--moe-token-drop-policy`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DropPolicy {
    /// Those with the lowest probabilities.
    #[default]
    Probs,
    /// The last ones.
    Position,
}

/// How tokens are dispatched to the ranks of their experts (Megatron's `--moe-token-dispatcher-type`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Dispatcher {
    /// Each rank sends every token to the ranks that need it.
    #[default]
    #[serde(alias = "alltoall")]
    AllToAll,
    /// Every rank gets all tokens and picks those of its experts.
    #[serde(alias = "allgather")]
    AllGather,
}

/// Shared experts, as one MLP that all tokens use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedExperts {
    /// Features after its activation.
    pub intermediate: usize,
    /// Its output is multiplied with the sigmoid of a learned function of the token (Qwen2-MoE).
    pub gate: bool,
}

impl MoeConfig {
    /// Whether the sizes make a layer.
    ///
    /// # Errors
    /// Names the key, its value and the nearest legal one.
    pub fn check(&self) -> Result<(), ConfigError> {
        let RouterConfig { top_k, groups, z_loss, balance, .. } = self.router;
        positive(&[
            ("hidden_size", self.hidden),
            ("moe_intermediate_size", self.intermediate),
            ("num_experts", self.experts),
            ("num_experts_per_tok", top_k),
            ("shared_expert_intermediate_size", self.shared.map_or(1, |shared| shared.intermediate)),
        ])?;
        let most =
            |key, value: usize, range, most: usize| expect(value <= most, (key, value as f64), range, most as f64);
        most("num_experts_per_tok", top_k, "at most num_experts", self.experts)?;
        if let Some(ExpertGroups { groups, top_k: chosen, .. }) = groups {
            positive(&[("n_group", groups), ("topk_group", chosen)])?;
            divides("n_group", groups, "num_experts", self.experts)?;
            most("topk_group", chosen, "at most n_group", groups)?;
            let available = self.experts / groups * chosen;
            most("num_experts_per_tok", top_k, "at most the experts of topk_group groups", available)?;
        }
        let coefficient = balance.map_or(0.0, |balance| balance.coefficient);
        not_negative(&[("router_z_loss_coef", z_loss), ("router_aux_loss_coef", coefficient)])?;
        let factor = self.capacity.map_or(1.0, |capacity| capacity.factor);
        expect(factor.is_finite() && factor > 0.0, ("moe_capacity_factor", factor), "positive", 1.0)
    }
}

#[cfg(test)]
mod tests;
