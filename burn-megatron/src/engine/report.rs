//! What a step says of itself.

use super::{Anomaly, AnomalyAction, ExpertSummary};
use crate::grpo::GrpoSums;
use crate::preference::PreferenceMeans;
use backend_dist::comm::Group;
use serde::{Deserialize, Serialize};
use std::iter::Sum;

/// One finished optimizer step; equal on all ranks but for `seconds`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// Step, counted from 0.
    pub step: u64,
    /// Mean loss over the counted tokens of the global batch, before the update.
    pub loss: f64,
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
    /// Factor that clipping multiplied the gradients with, 1 where it did not.
    pub clip_factor: f64,
    /// Learning rate of the update.
    pub lr: f64,
    /// Counted tokens of the global batch.
    pub tokens: u64,
    /// Rows of the data set consumed so far, this step included.
    pub consumed: u64,
    /// Factor on the loss that kept `f16` gradients from vanishing; `None` for other types.
    pub loss_scale: Option<f64>,
    /// Nothing was updated: the gradients overflowed at that scale, which is lower from now on, or for `anomaly`.
    pub skipped: bool,
    /// Why the step's samples were left out, and what else is to be done.
    pub anomaly: Option<(Anomaly, AnomalyAction)>,
    /// Wall time of this rank's step.
    pub seconds: f64,
    /// How the experts were used, in models that have some.
    pub experts: Option<ExpertSummary>,
    /// Rewards, in preference tuning; the loss is then the mean over pairs.
    pub preference: Option<PreferenceMeans>,
    /// Sums over the tokens of completions, in GRPO.
    pub grpo: Option<GrpoSums>,
    /// Mean KL divergence from the teacher's distribution to the model's over the counted tokens, in distillation.
    pub teacher_kl: Option<f64>,
    /// The greatest attention logit of all layers, heads and tokens, with
    /// [`max_attention_logit`](super::EngineConfig::max_attention_logit).
    pub max_attention_logit: Option<f64>,
}

/// Loss on held-out sequences; equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EvalReport {
    /// Mean loss over the counted tokens; in preference tuning over the pairs.
    pub loss: f64,
    /// Counted tokens; in preference tuning pairs.
    pub tokens: u64,
    /// Share of the counted tokens that are the likeliest, where it was asked for.
    pub accuracy: Option<f64>,
    /// Mean KL divergence from the teacher's distribution to the model's, in distillation with a teacher.
    pub teacher_kl: Option<f64>,
    /// Rewards, in preference tuning.
    pub preference: Option<PreferenceMeans>,
}

/// Sums that ranks reduce to get a mean over all of them.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct LossSum {
    pub loss: f64,
    pub tokens: u64,
}

impl LossSum {
    /// The sum over the group in group order, so that all members get the same bits.
    pub fn total(self, group: &Group) -> Self {
        group.all_gather_host(self).into_iter().sum()
    }

    /// The mean; 0 where nothing counts.
    pub fn mean(self) -> f64 {
        self.loss / self.tokens.max(1) as f64
    }
}

impl Sum for LossSum {
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        parts.fold(Self::default(), |sum, part| Self { loss: sum.loss + part.loss, tokens: sum.tokens + part.tokens })
    }
}
