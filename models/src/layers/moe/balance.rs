//! Losses that balance the experts, after Megatron-LM's `switch_load_balancing_loss_func` and `z_loss_func` in
//! `megatron/core/transformer/moe/moe_utils.py` and their callers in `router.py`.
//!
//! Each is a mean over the tokens of a micro-batch, of which a rank has some. A rank computes its own summand; what it
//! needs to know of the others are counts, which have no gradient.

use std::collections::HashMap;
use std::sync::Arc;

use backend_dist::comm::Group;
use backend_dist::ops::{PassContext, PassKind, log_sum_exp, sum, sum_dim};
use burn::tensor::{Tensor, TensorData};
use parking_lot::Mutex;

use super::config::BalanceOver;
use super::decide::Tokens;
use crate::micro_batch::MicroBatch;
use crate::param::ParamBuilder;

/// The ranks whose tokens are counted together.
#[derive(Clone, Debug)]
pub(super) struct Shares {
    tp: Group,
    stage: Group,
    running: Arc<Mutex<Running>>,
}

/// Shares of the experts over the micro-batches of a step.
#[derive(Debug, Default)]
struct Running {
    step: u64,
    sum: Vec<f64>,
    passes: f64,
    /// Results of passes that will be recomputed, by micro-batch.
    again: HashMap<usize, Vec<f64>>,
}

impl Shares {
    pub fn new(params: &ParamBuilder) -> Self {
        Self { tp: params.parallel().group.clone(), stage: params.stage().clone(), running: Arc::default() }
    }

    /// Tokens of the micro-batch, of which this rank has `own`.
    pub fn tokens(&self, own: usize, batch: &MicroBatch) -> f64 {
        self.over_micro_batch(vec![own as f64], batch)[0]
    }

    /// The weights of the sums of scores, `experts` numbers or, over sequences, as many for each sample. `counted` are
    /// this rank's tokens of each expert, as many numbers; `total` is [`Shares::tokens`]; `again` says that this pass
    /// will be recomputed.
    pub fn weights(
        &self,
        over: BalanceOver,
        counted: Vec<f64>,
        [experts, top_k]: [usize; 2],
        (Tokens { samples, valid, .. }, total): (Tokens, f64),
        batch: &MicroBatch,
        again: bool,
    ) -> Vec<f64> {
        let scale = experts as f64 / (top_k as f64 * total);
        match over {
            BalanceOver::MicroBatch => {
                let counts = self.over_micro_batch(counted, batch);
                counts.into_iter().map(|count| scale * count / total).collect()
            }
            BalanceOver::Sequence => {
                // The mean over samples of the loss of each: `samples / total` is one over the length of a sequence.
                let length = total / samples as f64;
                let counts = self.over_micro_batch(counted, batch);
                counts.into_iter().map(|count| scale * count / length).collect()
            }
            BalanceOver::Global => {
                self.global(counted, valid as f64, again, &batch.pass).into_iter().map(|share| scale * share).collect()
            }
        }
    }

    fn over_micro_batch(&self, own: Vec<f64>, batch: &MicroBatch) -> Vec<f64> {
        let groups = [Some(&self.tp), batch.context.as_ref().map(|context| &context.group)];
        groups.into_iter().flatten().fold(own, summed)
    }

    /// Copies of a token that each expert gets, the mean over all ranks and the passes of this step. A recomputed pass
    /// has the same result as the first one.
    fn global(&self, own: Vec<f64>, tokens: f64, again: bool, pass: &PassContext) -> Vec<f64> {
        let mut running = self.running.lock();
        if running.step != pass.step {
            *running = Running { step: pass.step, ..Running::default() };
        }
        if pass.kind == PassKind::Recomputation
            && let Some(found) = running.again.remove(&pass.micro_batch)
        {
            return found;
        }
        let mut sums = summed([own, vec![tokens]].concat(), &self.stage);
        let tokens = sums.pop().expect("the tokens come last");
        running.sum.resize(sums.len(), 0.0);
        // No rank has any where all have padding alone.
        if tokens > 0.0 {
            running.sum.iter_mut().zip(sums).for_each(|(sum, count)| *sum += count / tokens);
            running.passes += 1.0;
        }
        let mean: Vec<f64> = running.sum.iter().map(|sum| sum / running.passes).collect();
        if again {
            running.again.insert(pass.micro_batch, mean.clone());
        }
        mean
    }
}

/// Element-wise sums over the group, in its order.
fn summed(own: Vec<f64>, group: &Group) -> Vec<f64> {
    if group.size() == 1 {
        return own;
    }
    let add = |sums: Vec<f64>, others: Vec<f64>| sums.iter().zip(others).map(|(sum, other)| sum + other).collect();
    group.all_gather_host(own).into_iter().reduce(add).expect("a group has members")
}

/// `Σ_t scores[t]` for the scores `[tokens, experts]` of a rank, `[1, experts]`, or concatenated for each of some
/// samples.
pub(super) fn sums(scores: Tensor<2>, samples: usize) -> Tensor<2> {
    let [tokens, experts] = scores.dims();
    sum_dim(scores.reshape([tokens / samples, samples * experts]), 0)
}

/// `Σ weights · sums`, without the coefficient: a weight for each of [`sums`].
pub(super) fn loss(sums: Tensor<2>, weights: Vec<f64>) -> Tensor<1> {
    let columns = weights.len();
    let weights = Tensor::from_data(TensorData::new(weights, [1, columns]), (&sums.device(), sums.dtype()));
    sum(sums * weights)
}

/// `Σ_t logsumexp(logits[t])² / total` for the logits `[tokens, experts]` of a rank, without the coefficient.
pub(super) fn z_loss(logits: Tensor<2>, total: f64) -> Tensor<1> {
    // Burn's gradient of a division by a number rounds it to f32.
    sum(log_sum_exp(logits).powi_scalar(2)) * (1.0 / total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recomputed_passes_have_the_same_shares() {
        let shares = Shares { tp: Group::single(), stage: Group::single(), running: Arc::default() };
        let pass = |kind, micro_batch| PassContext { kind, step: 1, micro_batch, ..PassContext::default() };
        let global = |own: [f64; 2], kind, micro_batch| shares.global(own.into(), 2.0, true, &pass(kind, micro_batch));
        let first = global([1.0, 3.0], PassKind::Training, 0);
        let second = global([3.0, 1.0], PassKind::Training, 1);
        assert_eq!([&first, &second], [&vec![0.5, 1.5], &vec![1.0, 1.0]]);
        let again = [1, 0].map(|micro_batch| global([9.0, 9.0], PassKind::Recomputation, micro_batch));
        assert_eq!(again, [second, first]);
        let next = PassContext { step: 2, ..PassContext::default() };
        assert_eq!(shares.global(vec![4.0, 0.0], 2.0, false, &next), [2.0, 0.0], "a step begins with new counts");
    }
}
