//! Numbers that say how the completions of a step were.

use serde::{Deserialize, Serialize};

use super::{TokenLoss, moments};

/// Sums over the tokens of completions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GrpoSums {
    /// Of the losses, each with its completion's factor.
    pub loss: f64,
    /// Of the estimates of the KL divergence.
    pub kl: f64,
    /// Tokens whose ratio is clipped.
    pub clipped: u64,
    /// Tokens.
    pub tokens: u64,
}

impl GrpoSums {
    /// Adds a token, whose loss has this factor.
    pub fn add(&mut self, token: &TokenLoss, factor: f64) {
        let loss = token.loss * factor;
        *self = self.plus(Self { loss, kl: token.kl, clipped: u64::from(token.clipped), tokens: 1 });
    }

    /// Both together.
    pub fn plus(self, other: Self) -> Self {
        Self {
            loss: self.loss + other.loss,
            kl: self.kl + other.kl,
            clipped: self.clipped + other.clipped,
            tokens: self.tokens + other.tokens,
        }
    }
}

/// The completions of a global batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RewardStats {
    /// Mean reward.
    pub reward: f64,
    /// Mean over the groups of the standard deviation of their rewards.
    pub reward_std: f64,
    /// Mean number of tokens.
    pub completion_length: f64,
    /// Share of the completions that have not ended.
    pub completions_clipped: f64,
}

impl RewardStats {
    /// Of rewards, group by group, lengths, and which completions have ended.
    pub fn of(rewards: &[f64], lengths: &[usize], ended: &[bool], group: usize) -> Self {
        let count = rewards.len().max(1) as f64;
        let deviations: Vec<f64> = rewards.chunks(group.max(1)).map(|group| moments(group).1).collect();
        Self {
            reward: moments(rewards).0,
            reward_std: moments(&deviations).0,
            completion_length: lengths.iter().sum::<usize>() as f64 / count,
            completions_clipped: ended.iter().filter(|ended| !**ended).count() as f64 / count,
        }
    }
}

/// What a step of GRPO says of itself, after TRL's names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GrpoMeans {
    /// Mean reward of the completions.
    pub reward: f64,
    /// Mean over the groups of the standard deviation of their rewards; 0: no group has anything to learn from.
    pub reward_std: f64,
    /// Mean number of tokens of a completion.
    pub completion_length: f64,
    /// Share of the completions that were cut off at the longest possible length.
    pub completions_clipped: f64,
    /// Mean over tokens of the estimate of the KL divergence from the reference model; 0 without one.
    pub kl: f64,
    /// Share of the tokens whose ratio is clipped.
    pub clip_ratio: f64,
}

impl GrpoMeans {
    /// From completions and the sums over their tokens.
    pub fn of(stats: &RewardStats, sums: &GrpoSums) -> Self {
        let tokens = sums.tokens.max(1) as f64;
        let RewardStats { reward, reward_std, completion_length, completions_clipped } = *stats;
        let (kl, clip_ratio) = (sums.kl / tokens, sums.clipped as f64 / tokens);
        Self { reward, reward_std, completion_length, completions_clipped, kl, clip_ratio }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_are_over_completions_groups_and_tokens() {
        let stats = RewardStats::of(&[1.0, 0.0, 1.0, 1.0], &[2, 4, 6, 8], &[true, true, true, false], 2);
        assert_eq!((stats.reward, stats.completion_length, stats.completions_clipped), (0.75, 5.0, 0.25));
        assert!((stats.reward_std - 0.5f64.sqrt() / 2.0).abs() < 1e-12);
        let mut sums = GrpoSums::default();
        sums.add(&TokenLoss { loss: 2.0, derivative: 0.0, kl: 0.5, clipped: true }, 0.25);
        sums.add(&TokenLoss { loss: 4.0, derivative: 0.0, kl: 0.0, clipped: false }, 0.25);
        let means = GrpoMeans::of(&stats, &sums);
        assert_eq!((sums.loss, means.kl, means.clip_ratio), (1.5, 0.25, 0.5));
    }
}
