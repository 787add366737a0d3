//! What metrics say of many pairs.

use serde::{Deserialize, Serialize};

use super::PairLoss;

/// Sums over pairs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PreferenceSums {
    /// Of the losses.
    pub loss: f64,
    /// Pairs.
    pub pairs: u64,
    /// Of the rewards of chosen and of rejected answers.
    pub rewards: [f64; 2],
    /// Pairs whose chosen answer has the higher reward.
    pub right: u64,
}

impl PreferenceSums {
    /// Adds a pair.
    pub fn add(&mut self, pair: &PairLoss) {
        let [chosen, rejected] = pair.rewards;
        let one = Self { loss: pair.loss, pairs: 1, rewards: pair.rewards, right: u64::from(chosen > rejected) };
        *self = self.plus(one);
    }

    /// Both together.
    pub fn plus(self, other: Self) -> Self {
        Self {
            loss: self.loss + other.loss,
            pairs: self.pairs + other.pairs,
            rewards: [self.rewards[0] + other.rewards[0], self.rewards[1] + other.rewards[1]],
            right: self.right + other.right,
        }
    }

    /// The means.
    pub fn means(&self) -> PreferenceMeans {
        let pairs = self.pairs.max(1) as f64;
        let [chosen, rejected] = self.rewards.map(|sum| sum / pairs);
        PreferenceMeans {
            rewards_chosen: chosen,
            rewards_rejected: rejected,
            rewards_margin: chosen - rejected,
            rewards_accuracy: self.right as f64 / pairs,
            pairs: self.pairs,
        }
    }
}

/// Means over pairs, under TRL's names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PreferenceMeans {
    /// Reward of the chosen answers.
    pub rewards_chosen: f64,
    /// Reward of the rejected answers.
    pub rewards_rejected: f64,
    /// Their difference.
    pub rewards_margin: f64,
    /// Share of the pairs whose chosen answer has the higher reward.
    pub rewards_accuracy: f64,
    /// Pairs.
    pub pairs: u64,
}

impl PreferenceMeans {
    /// The means of these pairs and of others together.
    pub fn over(self, others: Option<Self>) -> Self {
        let Some(others) = others else { return self };
        let share = self.pairs as f64 / (self.pairs + others.pairs).max(1) as f64;
        let both = |own: f64, other: f64| own * share + other * (1.0 - share);
        Self {
            rewards_chosen: both(self.rewards_chosen, others.rewards_chosen),
            rewards_rejected: both(self.rewards_rejected, others.rewards_rejected),
            rewards_margin: both(self.rewards_margin, others.rewards_margin),
            rewards_accuracy: both(self.rewards_accuracy, others.rewards_accuracy),
            pairs: self.pairs + others.pairs,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_are_over_all_pairs() {
        let mut sums = PreferenceSums::default();
        sums.add(&PairLoss { loss: 1.0, derivatives: [0.0; 2], rewards: [2.0, 1.0] });
        sums.add(&PairLoss { loss: 3.0, derivatives: [0.0; 2], rewards: [0.0, 1.0] });
        let means = sums.means();
        assert_eq!((sums.loss, means.rewards_margin, means.rewards_accuracy, means.pairs), (4.0, 0.0, 0.5, 2));
        let more = PreferenceMeans { rewards_accuracy: 1.0, rewards_margin: 3.0, pairs: 1, ..means };
        let all = more.over(Some(means));
        assert!((all.rewards_accuracy - 2.0 / 3.0).abs() < 1e-12 && (all.rewards_margin - 1.0).abs() < 1e-12);
        assert_eq!((all.pairs, means.over(None)), (3, means));
    }
}
