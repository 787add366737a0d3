//! Which loss each token of a micro-batch of completions has in GRPO. Pure.

use super::TokenBatch;
use crate::grpo::{GrpoConfig, GrpoSums};

/// What GRPO must know of a micro-batch whose sequences are a prompt with a completion each, of which the tokens of the
/// completion count.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rollouts {
    /// Of each sequence.
    pub advantages: Vec<f64>,
    /// Of this rank's tokens, sequence by sequence, the log-probabilities when they were drawn; `None`: by the policy as
    /// it is.
    pub old: Option<Vec<f64>>,
    /// The same under the reference model, if there is one.
    pub reference: Option<Vec<f64>>,
}

/// The completions of a micro-batch.
pub(super) struct Completions {
    rollouts: Rollouts,
    /// Tokens of each, over all ranks that share the sequence.
    lengths: Vec<usize>,
}

impl Completions {
    /// Those of a batch of whole sequences.
    pub fn of(batch: &TokenBatch, rollouts: Rollouts) -> Self {
        let counts = |mask: &[bool]| mask.iter().filter(|counts| **counts).count();
        let lengths = match &batch.mask {
            Some(mask) => mask.chunks(batch.seq).map(counts).collect(),
            None => vec![batch.seq; batch.sequences],
        };
        Self { rollouts, lengths }
    }

    /// The units of the loss, see [`GrpoConfig::units`].
    pub fn units(&self, config: &GrpoConfig) -> u64 {
        config.units(self.lengths.len(), self.lengths.iter().sum())
    }

    /// The sums over this rank's tokens, from their losses, and the factors of the gradients of these.
    pub fn score(&self, config: &GrpoConfig, local: &TokenBatch, losses: &[f64]) -> (GrpoSums, Vec<f64>) {
        let (mut sums, mut factors) = (GrpoSums::default(), vec![0.0; losses.len()]);
        let Rollouts { advantages, old, reference } = &self.rollouts;
        for (at, loss) in losses.iter().enumerate() {
            if local.mask.as_ref().is_some_and(|mask| !mask[at]) {
                continue;
            }
            let sequence = at / local.seq;
            let [old, reference] = [old, reference].map(|values| values.as_ref().map(|values| values[at]));
            let token = config.token(advantages[sequence], -loss, old, reference);
            let factor = config.factor(self.lengths[sequence]);
            factors[at] = -token.derivative * factor;
            sums.add(&token, factor);
        }
        (sums, factors)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_have_the_advantage_of_their_completion_and_prompts_have_none() {
        let mask = Some(vec![false, true, true, false, false, true]);
        let batch = TokenBatch { mask, ..TokenBatch::from_sequences(&[1, 2, 3, 4, 5, 6, 7, 8], 3) };
        let rollouts =
            Rollouts { advantages: vec![1.0, -2.0], old: None, reference: Some(vec![0.0, -1.0, -2.0, 0.0, 0.0, -1.0]) };
        let completions = Completions::of(&batch, rollouts);
        let config = GrpoConfig { beta: 0.5, ..GrpoConfig::default() };
        assert_eq!(completions.units(&config), 2);
        let (sums, factors) = completions.score(&config, &batch, &[9.0, 1.0, 1.0, 9.0, 9.0, 3.0]);
        // The KL divergence is that of the second token, of log-ratio -1, and of the last, of log-ratio 2.
        let kl = [(-1f64).exp(), 2f64.exp() - 3.0];
        assert!((sums.kl - kl[0] - kl[1]).abs() < 1e-12 && sums.tokens == 3);
        assert!((sums.loss - (-1.0 + 0.25 * kl[0] + 2.0 + 0.5 * kl[1])).abs() < 1e-12, "{sums:?}");
        assert_eq!([factors[0], factors[3], factors[4]], [0.0; 3]);
        assert!((factors[1] - 0.5).abs() < 1e-12, "{factors:?}");
        assert!((factors[5] - (-2.0 - 0.5 * (1.0 - 2f64.exp()))).abs() < 1e-12, "{factors:?}");
        // Ranks that share sequences have parts of the same sums.
        let [left, right] = [vec![0..1, 2..3], vec![1..2]].map(|positions| {
            let values = |all: [f64; 6]| {
                all.chunks(3).flat_map(|all| positions.iter().cloned().flatten().map(|at| all[at])).collect::<Vec<_>>()
            };
            let reference = Some(values([0.0, -1.0, -2.0, 0.0, 0.0, -1.0]));
            let part = Completions::of(&batch, Rollouts { advantages: vec![1.0, -2.0], old: None, reference });
            part.score(&config, &batch.at_positions(&positions), &values([9.0, 1.0, 1.0, 9.0, 9.0, 3.0])).0
        });
        let both = left.plus(right);
        assert!((both.loss - sums.loss).abs() < 1e-12 && both.tokens == 3, "{both:?} {sums:?}");
    }
}
