//! Group relative policy optimization (Shao et al., "DeepSeekMath", 2024). Pure.
//!
//! Of every prompt the policy writes a group of completions. With the reward `r` of a completion, and mean and standard
//! deviation over its group, each of its tokens has the advantage `A = (r - mean) / (std + 1e-4)`. With the
//! log-probability `p` of a token under the policy, `o` when it was drawn, and `f` under the frozen reference model, the
//! loss of the token is
//!
//! `-min(ρ A, clip(ρ, 1 - ε, 1 + ε_high) A) + β (exp(f - p) - (f - p) - 1)`, with `ρ = exp(p - o)`:
//!
//! equations 3 and 4 of the paper, as TRL's `GRPOTrainer._compute_loss` has them. [`GrpoLoss`] says how the tokens' losses
//! become one. The gradient of such a loss is that of a weighted sum of the tokens' cross-entropies: each token's weight is
//! minus the derivative by its log-probability.

mod metrics;
mod reward;

use serde::{Deserialize, Serialize};

pub use metrics::{GrpoMeans, GrpoSums, RewardStats};
pub use reward::{Completion, ExactAnswer, Reward};

/// How the losses of tokens become the loss of a batch, under TRL's names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GrpoLoss {
    /// The mean over completions of the mean over their tokens (the paper's).
    #[default]
    Grpo,
    /// The mean over all tokens of the global batch (Yu et al., "DAPO", 2025).
    Dapo,
    /// The sum over tokens divided by completions times the longest possible completion, which does not depend on how long
    /// they are (Liu et al., "Understanding R1-Zero-Like Training", 2025).
    DrGrpo,
}

/// A loss and its constants, under TRL's names.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct GrpoConfig {
    /// Completions of a prompt.
    pub num_generations: usize,
    /// Most tokens of a completion.
    pub max_completion_length: usize,
    /// Of the distribution that tokens are drawn from, which is the policy.
    pub temperature: f64,
    /// Optimizer steps on the same completions.
    pub num_iterations: usize,
    /// Weight of the KL divergence from the reference model; 0: there is none.
    pub beta: f64,
    /// ε.
    pub epsilon: f64,
    /// ε_high, where it is another.
    pub epsilon_high: Option<f64>,
    /// How tokens' losses become one.
    pub loss_type: GrpoLoss,
    /// Whether advantages are divided by the standard deviation of their group.
    pub scale_rewards: bool,
}

/// TRL's constants, with the paper's loss and the paper's weight of the KL divergence.
impl Default for GrpoConfig {
    fn default() -> Self {
        Self {
            num_generations: 8,
            max_completion_length: 256,
            temperature: 1.0,
            num_iterations: 1,
            beta: 0.04,
            epsilon: 0.2,
            epsilon_high: None,
            loss_type: GrpoLoss::Grpo,
            scale_rewards: true,
        }
    }
}

/// What follows for a token.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TokenLoss {
    /// The loss.
    pub loss: f64,
    /// Its derivative by the policy's log-probability.
    pub derivative: f64,
    /// The estimate of the KL divergence.
    pub kl: f64,
    /// The ratio is beyond the bound to which the advantage pushes it, and has no gradient.
    pub clipped: bool,
}

impl GrpoConfig {
    /// The loss of a token of a completion with this advantage: its log-probability under the policy, when it was drawn
    /// (`None`: by the policy as it is, a ratio of 1), and under the reference model, if there is one.
    pub fn token(&self, advantage: f64, policy: f64, old: Option<f64>, reference: Option<f64>) -> TokenLoss {
        let ratio = (policy - old.unwrap_or(policy)).exp();
        let bounded = ratio.clamp(1.0 - self.epsilon, 1.0 + self.epsilon_high.unwrap_or(self.epsilon));
        let clipped = bounded * advantage < ratio * advantage;
        let gain = (ratio * advantage).min(bounded * advantage);
        let slope = if clipped { 0.0 } else { ratio * advantage };
        // Schulman's estimate, at least 0 (http://joschu.net/blog/kl-approx.html).
        let (kl, kl_slope) = reference.map_or((0.0, 0.0), |reference| {
            let log_ratio = reference - policy;
            (log_ratio.exp() - log_ratio - 1.0, 1.0 - log_ratio.exp())
        });
        TokenLoss { loss: self.beta * kl - gain, derivative: self.beta * kl_slope - slope, kl, clipped }
    }

    /// The factor of the losses of a completion's tokens, if it has so many, before the division by all
    /// [`units`](Self::units).
    pub fn factor(&self, tokens: usize) -> f64 {
        match self.loss_type {
            GrpoLoss::Grpo => 1.0 / tokens.max(1) as f64,
            GrpoLoss::Dapo | GrpoLoss::DrGrpo => 1.0,
        }
    }

    /// What the loss is a mean over, of completions with so many tokens together.
    pub fn units(&self, completions: usize, tokens: usize) -> u64 {
        let units = match self.loss_type {
            GrpoLoss::Grpo => completions,
            GrpoLoss::Dapo => tokens,
            GrpoLoss::DrGrpo => completions * self.max_completion_length,
        };
        units as u64
    }

    /// The advantages of completions from their rewards, group by group.
    pub fn advantages(&self, rewards: &[f64]) -> Vec<f64> {
        let of_group = |group: &[f64]| {
            let (mean, deviation) = moments(group);
            let scale = if self.scale_rewards { deviation + 1e-4 } else { 1.0 };
            group.iter().map(|reward| (reward - mean) / scale).collect::<Vec<_>>()
        };
        rewards.chunks(self.num_generations.max(1)).flat_map(of_group).collect()
    }
}

/// Mean and standard deviation, that of a sample as `torch.std` gives it; 0 for one value.
pub(super) fn moments(values: &[f64]) -> (f64, f64) {
    let count = values.len().max(1) as f64;
    let mean = values.iter().sum::<f64>() / count;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (mean, (squares / (count - 1.0).max(1.0)).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// TRL's formula, written without what saves work.
    fn by_hand(config: &GrpoConfig, a: f64, p: f64, o: f64, f: f64) -> f64 {
        let ratio = (p - o).exp();
        let high = 1.0 + config.epsilon_high.unwrap_or(config.epsilon);
        let bounded = ratio.max(1.0 - config.epsilon).min(high);
        -f64::min(ratio * a, bounded * a) + config.beta * ((f - p).exp() - (f - p) - 1.0)
    }

    #[test]
    fn losses_are_the_papers_and_derivatives_theirs() {
        let config = GrpoConfig { beta: 0.3, epsilon_high: Some(0.28), ..GrpoConfig::default() };
        let mut clipped = 0;
        for advantage in [-1.5, -0.2, 0.0, 0.7, 2.0] {
            for (p, o) in [(-1.0, -1.0), (-1.0, -1.1), (-1.0, -2.0), (-2.0, -1.0), (-0.1, -6.0), (-6.0, -0.1)] {
                let f = -1.3;
                let found = config.token(advantage, p, Some(o), Some(f));
                assert!((found.loss - by_hand(&config, advantage, p, o, f)).abs() < 1e-12);
                let step = 1e-6;
                let [up, down] = [step, -step].map(|by| by_hand(&config, advantage, p + by, o, f));
                let quotient = (up - down) / (2.0 * step);
                assert!((quotient - found.derivative).abs() < 1e-6 * quotient.abs().max(1.0), "{quotient} {found:?}");
                clipped += usize::from(found.clipped);
            }
        }
        assert_eq!(clipped, 8, "too likely already with a positive advantage, too unlikely with a negative one");
        let fresh = config.token(0.7, -1.0, None, None);
        assert_eq!((fresh.loss, fresh.derivative, fresh.kl, fresh.clipped), (-0.7, -0.7, 0.0, false));
    }

    #[test]
    fn advantages_are_of_the_group() {
        let config = GrpoConfig { num_generations: 3, ..GrpoConfig::default() };
        let found = config.advantages(&[1.0, 0.0, 0.5, 2.0, 2.0, 2.0]);
        assert_eq!(found[3..], [0.0; 3], "nothing is better than anything else");
        let expected = [0.5, -0.5, 0.0].map(|difference| difference / (0.5 + 1e-4));
        assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12), "{found:?}");
        let plain = GrpoConfig { scale_rewards: false, ..config };
        assert_eq!(plain.advantages(&[1.0, 0.0, 0.5]), [0.5, -0.5, 0.0]);
    }

    #[test]
    fn each_kind_of_loss_is_a_mean_over_its_own_units() {
        let of = |loss_type| GrpoConfig { loss_type, max_completion_length: 10, ..GrpoConfig::default() };
        let mean = |loss_type| {
            let config = of(loss_type);
            let lengths = [2, 4];
            let sum: f64 = lengths.iter().map(|tokens| config.factor(*tokens) * *tokens as f64).sum();
            sum / config.units(2, 6) as f64
        };
        assert_eq!([GrpoLoss::Grpo, GrpoLoss::Dapo, GrpoLoss::DrGrpo].map(mean), [1.0, 1.0, 0.3]);
    }
}
