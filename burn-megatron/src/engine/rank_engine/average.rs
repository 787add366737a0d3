//! Evaluation with the moving average of the weights.

use super::RankEngine;
use models::CausalLm;

/// The model with its weights, while the engine computes with their average.
pub(crate) struct Weights<M>(Vec<M>);

impl<M: CausalLm> RankEngine<M> {
    /// Lets forward passes compute with the moving average of the weights, where there is one and
    /// [`evaluate_ema`](crate::engine::EngineConfig::evaluate_ema) says so, until
    /// [`leave_average`](Self::leave_average). All ranks call it together.
    pub(crate) fn enter_average(&mut self) -> Option<Weights<M>> {
        if self.config.ema_decay.is_none() || !self.config.evaluate_ema {
            return None;
        }
        let before = self.chunks.iter().map(|chunk| chunk.model().clone()).collect();
        for chunk in &mut self.chunks {
            chunk.for_buckets(|bucket, model| self.optimizer.enter_average(bucket, model));
        }
        self.weights_changed();
        Some(Weights(before))
    }

    /// Lets passes compute with the weights again.
    pub(crate) fn leave_average(&mut self, weights: Option<Weights<M>>) {
        let Some(Weights(before)) = weights else { return };
        for (chunk, model) in self.chunks.iter_mut().zip(before) {
            chunk.buckets.iter().for_each(|(_, bucket)| self.optimizer.leave_average(*bucket));
            chunk.change(|_| model);
        }
        self.weights_changed();
    }
}
