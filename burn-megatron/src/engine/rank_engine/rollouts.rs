//! GRPO: losses of completions, and log-probabilities of their tokens before a step.

use super::super::local_batch::LocalBatch;
use super::RankEngine;
use crate::engine::chunk::StandIn;
use crate::engine::{EngineError, TokenBatch};
use crate::grpo::{GrpoConfig, GrpoSums};
use burn::tensor::Tensor;
use models::CausalLm;
use models::layout::check_sequence;

/// The frozen model of GRPO's KL divergence.
pub enum Reference<M> {
    /// The model that is trained, its adapters switched off; not those of DoRA.
    WithoutAdapters,
    /// This rank's stages of another, in the order of the layers.
    Stages(Vec<M>),
}

impl<M: CausalLm> RankEngine<M> {
    /// With a reference model, which never changes.
    ///
    /// # Panics
    /// If it has not as many stages as this rank.
    pub fn with_reference(mut self, reference: Reference<M>) -> Self {
        if let Reference::Stages(stages) = &reference {
            assert_eq!(stages.len(), self.chunks.len(), "the reference has a stage for each of this rank's");
        }
        self.reference = Some(reference);
        self
    }

    /// The log-probabilities under the policy as it is of this rank's tokens of some micro-batches, sequence by sequence,
    /// and under the reference model if there is one; of tokens that do not count too. Only the last stage has any. All
    /// ranks call it together.
    ///
    /// # Errors
    /// [`EngineError::Token`], and if the length of sequences cannot be shared.
    pub fn token_log_probabilities(&mut self, micro_batches: &[TokenBatch]) -> Result<Vec<Vec<f64>>, EngineError> {
        let layout = self.rank.mesh.layout();
        micro_batches.iter().try_for_each(|batch| check_sequence(layout, batch.seq))?;
        micro_batches.iter().try_for_each(|batch| batch.check_tokens(self.vocabulary))?;
        let own: Vec<LocalBatch> = micro_batches.iter().map(|batch| self.local_batch(batch)).collect();
        let mut all = vec![Vec::new(); own.len()];
        self.forward_sampled(&own, |_, micro_batch, losses| {
            all[micro_batch] = losses.into_data().iter::<f64>().map(|loss| -loss).collect();
        });
        Ok(all)
    }

    /// [`token_log_probabilities`](Self::token_log_probabilities) under the reference model; `None` without one.
    ///
    /// # Errors
    /// As there.
    pub fn reference_log_probabilities(
        &mut self,
        micro_batches: &[TokenBatch],
    ) -> Result<Option<Vec<Vec<f64>>>, EngineError> {
        let Some(reference) = self.reference.take() else { return Ok(None) };
        for (at, chunk) in self.chunks.iter_mut().enumerate() {
            chunk.stand_in(Some(match &reference {
                Reference::WithoutAdapters => StandIn::WithoutAdapters,
                Reference::Stages(stages) => StandIn::Other(stages[at].clone()),
            }));
        }
        let found = self.token_log_probabilities(micro_batches);
        self.chunks.iter_mut().for_each(|chunk| chunk.stand_in(None));
        self.reference = Some(reference);
        found.map(Some)
    }

    /// The losses of a micro-batch's completions, whose gradients are kept for its backward pass. Fails with
    /// [`EngineError::NonFiniteLoss`].
    pub(super) fn score_completions(
        &mut self,
        micro_batch: usize,
        local: &LocalBatch,
        losses: Tensor<2>,
        config: &GrpoConfig,
    ) -> Result<GrpoSums, EngineError> {
        let losses: Vec<f64> = losses.into_data().iter().collect();
        let scored = local.completions.as_ref().map(|completions| completions.score(config, &local.tokens, &losses));
        let (sums, factors) = scored.unwrap_or_default();
        self.check_finite(micro_batch, sums.loss)?;
        self.token_factors.insert(micro_batch, factors);
        Ok(sums)
    }

    /// Sums over all ranks; only the last stage has any.
    pub(super) fn all_completions(&self, own: GrpoSums) -> GrpoSums {
        let sum = |parts: Vec<GrpoSums>| parts.into_iter().fold(GrpoSums::default(), GrpoSums::plus);
        sum(self.stages.all_gather_host(sum(self.dp_ranks.all_gather_host(own))))
    }

    /// What the logits are divided by in training.
    pub(super) fn temperature(&self) -> f64 {
        self.config.grpo.map_or(1.0, |config| config.temperature)
    }
}
