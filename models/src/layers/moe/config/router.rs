//! How a router chooses experts. Plain data.

use serde::{Deserialize, Serialize};

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

/// Group-limited routing: a group's score is the sum of its best experts, the best groups are chosen from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Groups of neighbouring experts.
    pub groups: usize,
    /// Groups that a token may use.
    pub top_k: usize,
    /// Experts that are a group's score: the best one (DeepSeek-V2) or the best two (DeepSeek-V3,
    /// <https://arxiv.org/abs/2412.19437>; Megatron sums up `topk / group_topk` experts, which is two there).
    pub best: usize,
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
            groups: (groups > 1).then_some(ExpertGroups { groups, top_k: top_k_groups, best: 2 }),
            scaling,
            bias_rate: Some(bias_rate),
            ..Self::new(top_k)
        }
    }
}
