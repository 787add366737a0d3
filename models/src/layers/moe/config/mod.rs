//! What an MoE layer is made of. Plain data.

use backend_dist::ops::moe::ExpertActivation;
use backend_dist::shard::Init;
use serde::{Deserialize, Serialize};

use crate::config::{ConfigError, divides, positive};
use crate::layers::mlp::{Activation, MlpConfig};

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

/// How a router chooses.
#[derive(Clone, Copy, Debug)]
pub struct RouterConfig {
    /// Experts of each token.
    pub top_k: usize,
    /// How the router's logits become probabilities.
    pub scores: Scores,
    /// Only experts of some groups are chosen from.
    pub groups: Option<ExpertGroups>,
    /// The factor of the probabilities.
    pub scaling: f64,
    /// Choose by score plus a bias (auxiliary-loss-free balancing, Wang et al. 2024), which this rate moves after each
    /// step.
    pub bias_rate: Option<f64>,
    /// Load-balancing loss and its coefficient.
    pub balance: Option<Balance>,
    /// Coefficient of the z-loss; 0 is none.
    pub z_loss: f64,
    /// Where experts are chosen.
    pub device: RouterDevice,
}

/// Where experts are chosen, and the order of their tokens is computed. The results are the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RouterDevice {
    /// On GPUs, from which the host then reads only the number of each expert's tokens; on the host for f64, and where
    /// the order of the tokens depends on more than these numbers.
    #[default]
    Auto,
    /// On the host, which reads the router's logits.
    Host,
    /// By the operations for GPUs on every device, where the order of the tokens depends on their number only.
    Device,
}

/// How the router's logits become probabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scores {
    /// Softmax over the chosen experts (Megatron's default; Mixtral).
    SoftmaxAfterTopK,
    /// Softmax over all experts (Megatron's `--moe-router-pre-softmax`); the chosen experts' share of it as it is.
    SoftmaxBeforeTopK,
    /// Softmax over all experts; the chosen experts' share is brought to a sum of one (Qwen3-MoE's `norm_topk_prob`).
    NormalisedSoftmax,
    /// Sigmoid; with several experts for each token the chosen ones are brought to a sum of one (DeepSeek-V3).
    Sigmoid,
    /// Sigmoid as it is.
    PlainSigmoid,
}

/// Group-limited routing: a group's score is the sum of its two best experts, the best groups are chosen from
/// (DeepSeek-V3, <https://arxiv.org/abs/2412.19437>; Megatron sums up `topk / group_topk` experts, which is two there).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Groups of neighbouring experts.
    pub groups: usize,
    /// Groups that a token may use.
    pub top_k: usize,
}

/// A load-balancing loss.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Balance {
    /// Over which tokens experts are to be used alike.
    pub over: BalanceOver,
    /// The factor of the loss.
    pub coefficient: f64,
}

impl Balance {
    /// There is none where the coefficient is 0.
    pub fn new(over: BalanceOver, coefficient: f64) -> Option<Self> {
        (coefficient != 0.0).then_some(Self { over, coefficient })
    }
}

/// Over which tokens experts are to be used alike (Megatron's `--moe-router-load-balancing-type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BalanceOver {
    /// Those of a micro-batch (`aux_loss`).
    MicroBatch,
    /// Those of each sequence (`seq_aux_loss`).
    Sequence,
    /// Those of all micro-batches of a step that were computed so far, on all ranks (`global_aux_loss`): a mean over
    /// micro-batches, as in <https://arxiv.org/abs/2501.11873>. Megatron divides by the data-parallel size twice (by the
    /// tokens of all its ranks, and in the mean of gradients): its coefficient over that size has its gradients here.
    Global,
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

impl RouterConfig {
    /// `top_k` experts by softmax over their logits, without auxiliary losses.
    pub fn new(top_k: usize) -> Self {
        let scores = Scores::SoftmaxAfterTopK;
        Self {
            top_k,
            scores,
            groups: None,
            scaling: 1.0,
            bias_rate: None,
            balance: None,
            z_loss: 0.0,
            device: RouterDevice::Auto,
        }
    }

    /// `top_k` experts by sigmoids of their logits plus a bias, from the best `[groups, top_k]` of groups (DeepSeek-V3),
    /// without auxiliary losses.
    pub fn sigmoid(top_k: usize, is_normalised: bool, groups: [usize; 2], scaling: f64, bias_rate: f64) -> Self {
        let [groups, top_k_groups] = groups;
        Self {
            scores: if is_normalised { Scores::Sigmoid } else { Scores::PlainSigmoid },
            groups: (groups > 1).then_some(ExpertGroups { groups, top_k: top_k_groups }),
            scaling,
            bias_rate: Some(bias_rate),
            ..Self::new(top_k)
        }
    }
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
        let most = |key, value: usize, range, most: usize| match value <= most {
            true => Ok(()),
            false => Err(ConfigError::OutOfRange { key, value: value as f64, range, nearest: most as f64 }),
        };
        most("num_experts_per_tok", top_k, "at most num_experts", self.experts)?;
        if let Some(ExpertGroups { groups, top_k: chosen }) = groups {
            positive(&[("n_group", groups), ("topk_group", chosen)])?;
            divides("n_group", groups, "num_experts", self.experts)?;
            most("topk_group", chosen, "at most n_group", groups)?;
            let available = self.experts / groups * chosen;
            most("num_experts_per_tok", top_k, "at most the experts of topk_group groups", available)?;
        }
        let least = |key, value: f64, range| match value.is_finite() && value >= 0.0 {
            true => Ok(()),
            false => Err(ConfigError::OutOfRange { key, value, range, nearest: 0.0 }),
        };
        least("router_z_loss_coef", z_loss, "at least 0")?;
        least("router_aux_loss_coef", balance.map_or(0.0, |balance| balance.coefficient), "at least 0")?;
        match self.capacity.map_or(1.0, |capacity| capacity.factor) {
            factor if factor.is_finite() && factor > 0.0 => Ok(()),
            value => {
                Err(ConfigError::OutOfRange { key: "moe_capacity_factor", value, range: "positive", nearest: 1.0 })
            }
        }
    }
}

#[cfg(test)]
mod tests;
