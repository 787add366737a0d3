//! This rank's parts of micro-batches, and what their losses weigh.

use super::super::share::Share;
use super::RankEngine;
use crate::engine::{LossMean, TokenBatch};
use crate::optim::LossScaler;
use backend_dist::ops::context::ContextParallel;
use backend_dist::shard::stable_hash;
use models::CausalLm;
use models::layers::DropoutKey;

impl<M: CausalLm> RankEngine<M> {
    pub(super) fn dropout_seed(&self) -> u64 {
        stable_hash(&format!("dropout {} step {}", self.config.seed, self.step))
    }

    /// This rank's part of one of its micro-batches, for evaluation.
    pub(super) fn share(&self, batch: &TokenBatch) -> Share {
        let comm = self.config.context.of_layer(0);
        let context = self.context.clone().map(|group| ContextParallel { group, comm });
        Share::new(batch, context, self.config.documents)
    }

    /// The same of the step's micro-batch `index`, for training.
    pub(super) fn part(&self, index: usize, batch: &TokenBatch) -> Share {
        let mut share = self.share(batch);
        share.of.dropout = Some(DropoutKey {
            seed: self.dropout_seed(),
            first_sample: self.plan.rows(index, self.rank.coords.dp).start,
        });
        share.of.auxiliary = self.auxiliary_grad(batch, &share);
        share
    }

    /// The gradient of each counted loss of a micro-batch in what is minimized, before the division by the tokens of
    /// the global batch. Ranks that share the rows of a micro-batch have parts of one mean, and gradients are sums over
    /// them.
    pub(super) fn loss_grad(&self, share: &Share) -> f64 {
        let scale = self.scaler.as_ref().map_or(1.0, LossScaler::scale);
        match self.config.loss {
            LossMean::PerToken => scale,
            LossMean::PerMicroBatch => {
                scale / (share.counted.max(1) * self.plan.accumulation * self.plan.data_parallel) as f64
            }
        }
    }

    /// The gradient of an auxiliary loss, a mean over the tokens of a micro-batch, in what is minimized, before the
    /// division by the tokens of the global batch. Megatron multiplies it with all tokens, counted or not, but for
    /// those that fill sequences up (megatron/core/transformer/moe/router.py, `attach_and_log_load_balancing_loss`), so
    /// that a loss of each sequence by itself does not depend on how the batch is cut.
    pub(super) fn auxiliary_grad(&self, batch: &TokenBatch, share: &Share) -> f64 {
        let tokens = match self.config.loss {
            LossMean::PerToken => batch.rows * share.of.filled_from.unwrap_or(batch.seq).clamp(1, batch.seq),
            LossMean::PerMicroBatch => share.counted.max(1),
        };
        self.loss_grad(share) * tokens as f64
    }
}
