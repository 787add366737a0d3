//! This rank's shares of micro-batches, and the weight of their losses.

use super::super::local_batch::LocalBatch;
use super::RankEngine;
use crate::engine::rollouts::Completions;
use crate::engine::{LossMean, Rollouts, TokenBatch};
use crate::optim::LossScaler;
use backend_dist::ops::context::ContextParallel;
use backend_dist::shard::stable_hash;
use models::CausalLm;
use models::layers::DropoutKey;

impl<M: CausalLm> RankEngine<M> {
    pub(super) fn dropout_seed(&self) -> u64 {
        // Steps that were skipped do not count.
        stable_hash(&format!("dropout {} step {}", self.config.seed, self.optimizer.updates()))
    }

    /// This rank's share of one of its micro-batches, for evaluation.
    pub(super) fn local_batch(&self, batch: &TokenBatch) -> LocalBatch {
        let comm = self.config.context.of_layer(0);
        let context = self.context.clone().map(|group| ContextParallel { group, comm });
        LocalBatch::new(batch, context, self.config.documents)
    }

    /// This rank's share of the step's micro-batch `index`, for training.
    pub(super) fn training_batch(&self, index: usize, batch: &TokenBatch, rollouts: Option<&Rollouts>) -> LocalBatch {
        let mut local = self.local_batch(batch);
        local.completions = rollouts.map(|rollouts| Completions::of(batch, rollouts.clone()));
        local.micro_batch.dropout = Some(DropoutKey {
            seed: self.dropout_seed(),
            first_sample: self.plan.sequences(index, self.rank.coords.dp).start,
        });
        local.micro_batch.auxiliary = self.auxiliary_grad(batch, &local);
        local
    }

    /// The gradient of each counted loss of a micro-batch in what is minimized, before the division by the tokens of
    /// the global batch. Ranks that share the sequences of a micro-batch have parts of one mean; their gradients are
    /// summed.
    pub(super) fn loss_grad(&self, local: &LocalBatch) -> f64 {
        let scale = if self.poisoned { f64::NAN } else { self.scaler.as_ref().map_or(1.0, LossScaler::scale) };
        match self.config.loss {
            LossMean::PerToken => scale,
            LossMean::PerMicroBatch => {
                scale / (local.counted.max(1) * self.plan.accumulation * self.plan.data_parallel) as f64
            }
        }
    }

    /// The gradient of an auxiliary loss, a mean over the tokens of a micro-batch, in what is minimized, before the
    /// division by the tokens of the global batch. Megatron multiplies it with all tokens, counted or not, but for
    /// padding (megatron/core/transformer/moe/router.py, `attach_and_log_load_balancing_loss`), so
    /// that the loss of a sequence does not depend on how the batch is split; that of sequences only with those of one
    /// sequence (`_apply_seq_aux_loss` there), which is not followed.
    pub(super) fn auxiliary_grad(&self, batch: &TokenBatch, local: &LocalBatch) -> f64 {
        let tokens = match self.config.loss {
            LossMean::PerToken => {
                batch.sequences * local.micro_batch.filled_from.unwrap_or(batch.seq).clamp(1, batch.seq)
            }
            LossMean::PerMicroBatch => local.counted.max(1),
        };
        self.loss_grad(local) * tokens as f64
    }

    /// The same where the loss is a mean over `units` of the global batch, pairs or those of GRPO: a sequence has its share
    /// of them, however many are in it.
    pub(super) fn share_units(&self, units: u64, local_batches: &mut [LocalBatch]) {
        for local in local_batches {
            let share = units as f64 * local.tokens.sequences as f64 / self.plan.global() as f64;
            local.micro_batch.auxiliary = self.loss_grad(local) * share;
        }
    }
}
