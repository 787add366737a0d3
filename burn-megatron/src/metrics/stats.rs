//! What one step of the whole world reports.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::RankReading;
use super::gauge::mean;
use crate::engine::{ExpertLoad, ExpertSummary};
use crate::grpo::GrpoMeans;
use crate::preference::PreferenceMeans;

/// A mean loss and the number of tokens it is the mean of.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLoss {
    /// Mean negative log-likelihood per token, in nats.
    pub loss: f64,
    /// Tokens that count in the loss.
    pub tokens: u64,
}

/// Floating-point operations that one token of training takes; see [`flops`](crate::flops).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct FlopsPerToken {
    /// A causal attention counted as it is, as Megatron-LM.
    pub causal: f64,
    /// A causal attention counted in full, as torchtitan.
    pub full: f64,
    /// What a rank's device could do per second at best, if that is known.
    pub peak: Option<f64>,
}

/// One optimizer step of the whole world.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepStats {
    /// Number of the step, from 1.
    pub step: u64,
    /// Mean negative log-likelihood per token over the global batch, in nats; in preference tuning the mean over pairs.
    pub loss: f64,
    /// Tokens of the global batch that count in the loss.
    pub tokens: u64,
    /// All tokens of the global batch, sequences times their length: what teraflops and MFU count, as Megatron-LM's do.
    #[serde(skip)]
    pub computed_tokens: u64,
    /// L2 norm of the gradient of all parameters before clipping.
    pub grad_norm: f64,
    /// Learning rate of this step.
    pub lr: f64,
    /// Wall-clock seconds of this step, without a save after it.
    pub seconds: f64,
    /// On GPUs the most bytes that are taken of one of them. On CPU ranks the most bytes that a rank held at once in
    /// this step, the largest of all ranks, where a [`RankAllocator`](backend_dist::memory::RankAllocator) counts them;
    /// else the resident memory of the process; 0 where the system does not tell.
    pub memory: u64,
    /// Ranks of the world.
    #[serde(skip)]
    pub ranks: u64,
    /// What a token costs, if that is known.
    #[serde(skip)]
    pub flops: Option<FlopsPerToken>,
    /// Scale of the loss, where gradients are 16-bit floats with a small range.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// Nothing was updated: the gradients overflowed at that scale, or the step was an anomaly.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub skipped: bool,
    /// The share of this step in which pipeline ranks did not compute, if the step was traced.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bubble: Option<f64>,
    /// Norms of the gradients as `grad_norm/layers.N`, where they are asked for.
    #[serde(flatten, skip_deserializing)]
    pub grad_norms: BTreeMap<String, f64>,
    /// Elements of the gradient that are zero, where they are counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_zeros_in_grad: Option<u64>,
    /// The greatest attention logit, where it is asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_attention_logit: Option<f64>,
    /// How the experts were used, by layer; nothing in models without experts.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub experts: Vec<ExpertLoad>,
    /// Rewards, in preference tuning.
    #[serde(flatten)]
    pub preference: Option<PreferenceMeans>,
    /// Rewards and completions, in GRPO.
    #[serde(flatten)]
    pub grpo: Option<GrpoMeans>,
    /// Mean KL divergence from the teacher's distribution to the model's, in distillation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub teacher_kl: Option<f64>,
    /// The reading of every rank's GPU in this step; nothing on CPU ranks.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub gpus: Vec<RankReading>,
    /// The checkpoint that became complete since the step before, if one did.
    #[serde(skip)]
    pub saved: Option<SaveStats>,
}

/// A checkpoint that was written.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SaveStats {
    /// The step it holds.
    pub step: u64,
    /// Bytes of its tensors.
    pub bytes: u64,
    /// Seconds that training stood still for it: the copy of the state, and the wait for the save before.
    pub stall: f64,
    /// Seconds from the start of the write until the checkpoint was complete.
    pub seconds: f64,
    /// The share of the run's time so far in which training stood still for saves.
    pub share: f64,
}

/// A checkpoint that was loaded.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoadStats {
    /// The step it holds.
    pub step: u64,
    /// Bytes of its files.
    pub bytes: u64,
    /// Seconds from the first look at its files, whose hashes are checked, until all ranks had their slices.
    pub seconds: f64,
}

impl fmt::Display for LoadStats {
    /// `step 200, 1.21 GB in 0.9 s`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {}, {:.3} GB in {:.2} s", self.step, self.bytes as f64 / 1e9, self.seconds)
    }
}

impl fmt::Display for SaveStats {
    /// `step 200: stall 12.0 ms (0.1 % of the run), 1.210 GB in 0.90 s (1.34 GB/s)`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (gigabytes, milliseconds) = (self.bytes as f64 / 1e9, self.stall * 1e3);
        let rate = gigabytes / self.seconds;
        let (percent, Self { step, seconds, .. }) = (self.share * 100.0, self);
        write!(
            f,
            "step {step}: stall {milliseconds:.1} ms ({percent:.1} % of the run), {gigabytes:.3} GB in {seconds:.2} s \
             ({rate:.2} GB/s)"
        )
    }
}

impl StepStats {
    /// Tokens per second of the whole world that count in the loss.
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.seconds
    }

    /// Tokens per second of one rank that count in the loss.
    pub fn tokens_per_second_per_rank(&self) -> f64 {
        self.tokens_per_second() / self.ranks.max(1) as f64
    }

    /// FLOPs per second of one rank: a token without a loss costs as much as the others.
    fn flops_per_second(&self, per_token: impl Fn(FlopsPerToken) -> f64) -> Option<f64> {
        let rate = self.computed_tokens as f64 / self.seconds / self.ranks.max(1) as f64;
        self.flops.map(|flops| rate * per_token(flops))
    }

    /// Teraflops per second of one rank, attention counted as Megatron-LM does.
    pub fn teraflops(&self) -> Option<f64> {
        Some(self.flops_per_second(|flops| flops.causal)? / 1e12)
    }

    /// The same with attention counted in full, as torchtitan does.
    pub fn teraflops_full_attention(&self) -> Option<f64> {
        Some(self.flops_per_second(|flops| flops.full)? / 1e12)
    }

    /// Model FLOPs utilisation of one rank, attention counted as Megatron-LM does.
    pub fn mfu(&self) -> Option<f64> {
        Some(self.flops_per_second(|flops| flops.causal)? / self.flops?.peak?)
    }

    /// The same with attention counted in full, as torchtitan does.
    pub fn mfu_full_attention(&self) -> Option<f64> {
        Some(self.flops_per_second(|flops| flops.full)? / self.flops?.peak?)
    }

    /// Share of the step in which the GPUs had nothing to do, on average.
    pub fn gpu_idle(&self) -> Option<f64> {
        mean(&self.gpus, |gpu| gpu.idle)
    }

    /// The use of the experts in a few numbers.
    pub fn expert_summary(&self) -> Option<ExpertSummary> {
        ExpertSummary::of(&self.experts)
    }

    /// The step with all that follows from it, for files.
    pub(super) fn line(&self) -> StepLine<'_> {
        let experts = self.expert_summary();
        StepLine {
            stats: self,
            tokens_per_second: self.tokens_per_second(),
            tokens_per_second_per_rank: self.tokens_per_second_per_rank(),
            teraflops_per_rank: self.teraflops(),
            teraflops_per_rank_full_attention: self.teraflops_full_attention(),
            mfu: self.mfu(),
            mfu_full_attention: self.mfu_full_attention(),
            gpu_idle: self.gpu_idle(),
            expert_balance: experts.map(|experts| experts.balance),
            dropped_tokens: experts.map(|experts| experts.dropped),
            router_entropy: experts.map(|experts| experts.entropy),
            load_balancing_loss: experts.and_then(|experts| experts.load_balancing),
            z_loss: experts.and_then(|experts| experts.z),
        }
    }
}

/// All metrics of a step by the names that files use.
#[derive(Serialize)]
pub(super) struct StepLine<'a> {
    #[serde(flatten)]
    stats: &'a StepStats,
    tokens_per_second: f64,
    tokens_per_second_per_rank: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    teraflops_per_rank: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    teraflops_per_rank_full_attention: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mfu: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mfu_full_attention: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu_idle: Option<f64>,
    /// The fullest expert's tokens over the mean, in the worst layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    expert_balance: Option<f64>,
    /// Share of the copies of tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    dropped_tokens: Option<f64>,
    /// In nats, mean over layers.
    #[serde(skip_serializing_if = "Option::is_none")]
    router_entropy: Option<f64>,
    /// Without its coefficient, mean over layers and micro-batches.
    #[serde(skip_serializing_if = "Option::is_none")]
    load_balancing_loss: Option<f64>,
    /// Without its coefficient, mean over layers and micro-batches.
    #[serde(skip_serializing_if = "Option::is_none")]
    z_loss: Option<f64>,
}

/// One validation batch of the whole world.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvalStats {
    /// Mean negative log-likelihood per token, in nats.
    pub loss: f64,
    /// Tokens that count in the loss; in preference tuning pairs.
    pub tokens: u64,
    /// Share of these tokens that are the likeliest, in fine-tuning on conversations.
    pub accuracy: Option<f64>,
    /// Mean KL divergence from the teacher's distribution to the model's, in distillation with a teacher.
    pub teacher_kl: Option<f64>,
    /// Rewards, in preference tuning.
    pub preference: Option<PreferenceMeans>,
}
