//! A router's auxiliary losses and counts. The part that needs the logits alone is computed while the host waits for
//! the counts of the choice; the part that needs the counts follows the experts, where nobody waits for it.

use backend_dist::ops::moe::inject;
use backend_dist::ops::{log_sum_exp, normalize_sum, softmax, sum};
use burn::tensor::Tensor;
use burn::tensor::activation::sigmoid;

use super::super::balance;
use super::super::bias::ExpertTokens;
use super::super::config::Scores;
use super::super::decide::{Counts, Tokens, apart};
use super::super::stats;
use super::{Router, TINY};
use crate::micro_batch::MicroBatch;

/// The part that needs the logits alone.
pub(super) struct Auxiliary {
    tokens: Tokens,
    losses: Option<Losses>,
    /// Sum over the tokens, where it is counted.
    entropy: Option<Tensor<1>>,
}

/// The parts of the auxiliary losses.
struct Losses {
    /// Tokens of the micro-batch.
    total: f64,
    /// The pass will be recomputed.
    again: bool,
    /// [`balance::sums`] of the scores; `None` also without tokens.
    sums: Option<Tensor<2>>,
    /// Without its coefficient; `None` also without tokens.
    z: Option<Tensor<1>>,
}

/// What is left to be done after the experts.
pub(in crate::layers::moe) struct AfterExperts {
    pub(super) auxiliary: Auxiliary,
    pub(super) counts: Counts,
    /// Tokens that each expert has room for, if that is limited.
    pub(super) room: Option<usize>,
}

impl Router {
    /// Whether passes over `batch` have auxiliary losses.
    pub(super) fn has_losses(&self, batch: &MicroBatch) -> bool {
        batch.auxiliary != 0.0 && (self.config.balance.is_some() || self.config.z_loss != 0.0)
    }

    pub(super) fn auxiliary(&self, logits: &Tensor<2>, tokens: Tokens, batch: &MicroBatch) -> Auxiliary {
        let losses = self.has_losses(batch).then(|| self.parts(logits, tokens, batch));
        let entropy = (batch.router_stats().is_some() && tokens.valid > 0).then(|| {
            let logits = valid(logits, tokens).without_autodiff();
            let logs = logits.clone() - log_sum_exp(logits);
            -sum(logs.clone().exp() * logs)
        });
        Auxiliary { tokens, losses, entropy }
    }

    fn parts(&self, logits: &Tensor<2>, tokens: Tokens, batch: &MicroBatch) -> Losses {
        let total = self.shares.tokens(tokens.valid, batch);
        let again = !logits.is_autodiff();
        if tokens.valid == 0 {
            return Losses { total, again, sums: None, z: None };
        }
        let logits = valid(logits, tokens);
        let sums = self.config.balance.map(|kind| {
            let scores = match self.config.scores {
                Scores::Sigmoid | Scores::PlainSigmoid => normalize_sum(sigmoid(logits.clone()), TINY),
                _ => softmax(logits.clone()),
            };
            balance::sums(scores, apart(kind.over, tokens))
        });
        let z = (self.config.z_loss != 0.0).then(|| balance::z_loss(logits, total));
        Losses { total, again, sums, z }
    }

    /// `out`, the experts' outputs, with the gradients of the auxiliary losses; and counts.
    pub fn after_experts(
        &self,
        out: Tensor<2>,
        AfterExperts { auxiliary, counts, room }: AfterExperts,
        batch: &MicroBatch,
    ) -> Tensor<2> {
        let (Auxiliary { tokens, losses, entropy }, Counts { routed, counted }) = (auxiliary, counts);
        let (layer, bias) = (self.layer, self.expert_bias.as_ref().zip(self.config.bias_rate));
        let kept = |count: &usize| room.map_or(*count, |room| room.min(*count));
        if let (Some(counts), Some((bias, rate))) = (batch.bias_counts(), bias) {
            // Megatron-LM counts after dropping too (`_apply_expert_bias`); tokens that pad do not count here.
            let tokens = routed.iter().map(|count| kept(count) as u64).collect();
            counts.add(ExpertTokens { layer, param: bias.id.val(), rate, tokens });
        }
        if let Some(stats) = batch.router_stats() {
            stats.record(layer, |layer| {
                layer.routed(&routed, tokens.valid);
                layer.dropped(routed.iter().map(|count| count - kept(count)).sum());
                entropy.into_iter().for_each(|entropy| layer.entropy(entropy));
            });
        }
        let Some(Losses { total, again, sums, z }) = losses else { return out };
        let sizes = [routed.len(), self.config.top_k];
        // All ranks of the micro-batch do this, those without tokens too.
        let balance = self.config.balance.map(|kind| {
            (self.shares.weights(kind.over, counted, sizes, (tokens, total), batch, again), kind.coefficient)
        });
        let balance = sums.zip(balance).map(|(sums, (weights, coefficient))| {
            let loss = balance::loss(sums, weights);
            self.record(stats::Auxiliary::LoadBalancing, &loss, batch);
            loss * coefficient
        });
        let z = z.map(|loss| {
            self.record(stats::Auxiliary::Z, &loss, batch);
            loss * self.config.z_loss
        });
        match balance.into_iter().chain(z).reduce(|a, b| a + b) {
            Some(loss) => inject(out, loss, batch.auxiliary),
            None => out,
        }
    }

    fn record(&self, kind: stats::Auxiliary, loss: &Tensor<1>, batch: &MicroBatch) {
        if let Some(stats) = batch.router_stats() {
            stats.record(self.layer, |layer| layer.auxiliary(kind, loss.clone().without_autodiff()));
        }
    }
}

/// The tokens that count.
fn valid(logits: &Tensor<2>, tokens: Tokens) -> Tensor<2> {
    let experts = logits.dims()[1];
    logits.clone().slice([0..tokens.valid, 0..experts])
}
