//! Preference tuning: the losses of answers to losses of pairs, and to what the gradients of their tokens are.
//!
//! Ranks that share sequences have parts of an answer's log-probability; they sum them before they compute the loss of
//! a pair. The KL divergence of KTO takes a forward pass of all micro-batches before the step.

use super::super::local_batch::LocalBatch;
use super::super::report::LossSum;
use super::RankEngine;
use crate::batch::BatchPlan;
use crate::engine::{EngineError, TokenBatch};
use crate::preference::{Answer, PreferenceLoss, PreferenceSums};
use burn::tensor::Tensor;
use models::CausalLm;
use models::layout::check_sequence;
use serde::{Deserialize, Serialize};

/// A sum and a number of terms, from several ranks.
#[derive(Clone, Copy, Default, Serialize, Deserialize)]
struct Mean {
    sum: f64,
    terms: u64,
}

impl<M: CausalLm> RankEngine<M> {
    /// Whether what is minimized is a loss of pairs of answers.
    pub(crate) fn learns_pairs(&self) -> bool {
        self.config.preference.is_some()
    }

    /// The log-probability under this model of every answer of a batch, by sequence; all ranks get all of them. The
    /// number of sequences may be any multiple of micro-batch times data-parallel size.
    pub fn log_probabilities(&mut self, batch: &TokenBatch) -> Result<Vec<Vec<f64>>, EngineError> {
        let plan = BatchPlan::from_global(batch.sequences, self.plan.micro, self.plan.data_parallel)?;
        check_sequence(self.rank.mesh.layout(), batch.seq)?;
        batch.check_tokens(self.vocabulary)?;
        let dp = self.rank.coords.dp;
        let own: Vec<LocalBatch> =
            (0..plan.accumulation).map(|micro| self.local_batch(&batch.slice(plan.sequences(micro, dp)))).collect();
        let mut found: Vec<(usize, Vec<f64>)> = Vec::new();
        self.forward_only(&own, |engine, micro, losses| {
            let sums = engine.sums(&own[micro], losses);
            let by_sequence = own[micro].answers.as_ref().map(|answers| answers.by_sequence(&sums)).unwrap_or_default();
            if engine.rank.coords.cp == 0 {
                found.extend(plan.sequences(micro, dp).zip(by_sequence));
            }
        });
        let mut all = vec![Vec::new(); batch.sequences];
        let of_ranks: Vec<_> = self.dp_ranks.all_gather_host(found).into_iter().flatten().collect();
        let of_stages = self.stages.all_gather_host(of_ranks);
        of_stages.into_iter().flatten().for_each(|(sequence, sums)| all[sequence] = sums);
        Ok(all)
    }

    /// Of every answer of a micro-batch the policy's log-probability, from the losses of this rank's tokens.
    fn sums(&self, local: &LocalBatch, losses: Tensor<2>) -> Vec<f64> {
        let losses: Vec<f64> = losses.into_data().iter().collect();
        let sums = local.answers.as_ref().map(|answers| answers.sums(&local.tokens, &losses)).unwrap_or_default();
        match &self.context {
            None => sums,
            Some(group) => {
                let parts = group.all_gather_host(sums);
                (0..parts[0].len()).map(|at| parts.iter().map(|part| part[at]).sum()).collect()
            }
        }
    }

    /// The losses of a micro-batch's pairs, whose gradients are kept for its backward pass. Only the first of the ranks
    /// that share the sequences counts them. Fails with [`EngineError::NonFiniteLoss`].
    pub(super) fn score(
        &mut self,
        micro_batch: usize,
        local: &LocalBatch,
        losses: Tensor<2>,
        kl: f64,
    ) -> Result<PreferenceSums, EngineError> {
        let policy = self.sums(local, losses);
        let (sums, factors) = self.pair_losses(local, &policy, kl);
        self.check_finite(micro_batch, sums.loss / sums.pairs.max(1) as f64)?;
        self.token_factors.insert(micro_batch, factors);
        Ok(if self.rank.coords.cp == 0 { sums } else { PreferenceSums::default() })
    }

    fn pair_losses(&self, local: &LocalBatch, policy: &[f64], kl: f64) -> (PreferenceSums, Vec<f64>) {
        let mut sums = PreferenceSums::default();
        let (Some(config), Some(answers)) = (self.config.preference, &local.answers) else { return (sums, Vec::new()) };
        let mut derivatives = vec![0.0; policy.len()];
        for (at, pair, policy) in answers.pairs(&config, policy) {
            let [chosen, rejected] = [0, 1].map(|side| Answer { policy: policy[side], ..pair[side] });
            let loss = config.pair(&chosen, &rejected, kl);
            derivatives[at..at + 2].copy_from_slice(&loss.derivatives);
            sums.add(&loss);
        }
        (sums, answers.factors(&derivatives))
    }

    /// The KL divergence that KTO takes, 0 with other losses: the mean over the answers of the global batch to other
    /// prompts than their own.
    pub(super) fn kl(&mut self, own: &[LocalBatch]) -> Result<f64, EngineError> {
        let Some(config) = self.config.preference.filter(|config| config.loss == PreferenceLoss::Kto) else {
            return Ok(0.0);
        };
        let mut mean = Mean::default();
        self.forward_only(own, |engine, micro, losses| {
            let policy = engine.sums(&own[micro], losses);
            let Some(answers) = own[micro].answers.as_ref().filter(|_| engine.rank.coords.cp == 0) else { return };
            for (_, pair, policy) in answers.pairs(&config, &policy) {
                mean.sum += Answer { policy: policy[2], ..pair[2] }.log_ratio();
                mean.terms += 1;
            }
        });
        let all = self.dp_ranks.all_gather_host(mean);
        let (sum, terms) = all.iter().fold((0.0, 0), |(sum, terms), part| (sum + part.sum, terms + part.terms));
        Ok((sum / terms.max(1) as f64).max(0.0))
    }

    /// Loss and rewards of a batch that is not trained on.
    pub(super) fn evaluate_pairs(&mut self, own: &[LocalBatch]) -> Result<PreferenceSums, EngineError> {
        let kl = self.kl(own)?;
        let mut all = PreferenceSums::default();
        self.forward_only(own, |engine, micro, losses| {
            let policy = engine.sums(&own[micro], losses);
            if engine.rank.coords.cp == 0 {
                all = all.plus(engine.pair_losses(&own[micro], &policy, kl).0);
            }
        });
        Ok(self.all_pairs(all))
    }

    /// Sums over all ranks; only the last stage has any.
    pub(super) fn all_pairs(&self, own: PreferenceSums) -> PreferenceSums {
        let sum = |parts: Vec<PreferenceSums>| parts.into_iter().fold(PreferenceSums::default(), PreferenceSums::plus);
        sum(self.stages.all_gather_host(sum(self.dp_ranks.all_gather_host(own))))
    }

    /// What the loss of the global batch is a mean over, pairs or the units of GRPO; `None` where it is tokens.
    pub(super) fn count_units(&self, own: &[LocalBatch]) -> Option<u64> {
        if self.config.preference.is_none() && self.config.grpo.is_none() {
            return None;
        }
        let first = self.rank.coords.cp == 0;
        let tokens = if first { own.iter().filter_map(|local| self.units(local)).sum() } else { 0 };
        Some(LossSum { loss: 0.0, tokens }.total(&self.dp_ranks).tokens)
    }

    /// The same of a micro-batch, over all ranks that share its sequences.
    fn units(&self, local: &LocalBatch) -> Option<u64> {
        match (self.config.preference, self.config.grpo) {
            (Some(config), _) => Some(local.answers.as_ref().map_or(0, |answers| answers.count(&config) as u64)),
            (_, Some(config)) => Some(local.completions.as_ref().map_or(0, |completions| completions.units(&config))),
            _ => None,
        }
    }
}
