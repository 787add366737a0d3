//! Metrics of preference tuning and GRPO.

use super::reading::{Reading, StepMetric};
use super::stats::StepStats;

/// Mean reward of chosen answers less that of rejected ones, in preference tuning.
#[derive(Clone)]
pub struct RewardMarginReading;
/// [`RewardMarginReading`] as a metric.
pub type RewardMargin = StepMetric<RewardMarginReading>;

impl Reading for RewardMarginReading {
    type Input = StepStats;
    const NAME: &'static str = "Reward margin";
    const HIGHER_IS_BETTER: bool = true;

    fn read(input: &StepStats) -> (f64, u64) {
        let means = input.preference.unwrap_or_default();
        (means.rewards_margin, means.pairs)
    }
}

/// Share of pairs whose chosen answer has the higher reward, in preference tuning.
#[derive(Clone)]
pub struct RewardAccuracyReading;
/// [`RewardAccuracyReading`] as a metric.
pub type RewardAccuracy = StepMetric<RewardAccuracyReading>;

impl Reading for RewardAccuracyReading {
    type Input = StepStats;
    const NAME: &'static str = "Reward accuracy";
    const HIGHER_IS_BETTER: bool = true;

    fn read(input: &StepStats) -> (f64, u64) {
        let means = input.preference.unwrap_or_default();
        (means.rewards_accuracy, means.pairs)
    }
}

/// Mean reward of the completions, in GRPO.
#[derive(Clone)]
pub struct MeanRewardReading;
/// [`MeanRewardReading`] as a metric.
pub type MeanReward = StepMetric<MeanRewardReading>;

impl Reading for MeanRewardReading {
    type Input = StepStats;
    const NAME: &'static str = "Reward";
    const HIGHER_IS_BETTER: bool = true;

    fn read(input: &StepStats) -> (f64, u64) {
        (input.grpo.unwrap_or_default().reward, 1)
    }
}

/// Estimate of the KL divergence from the reference model, in GRPO.
#[derive(Clone)]
pub struct KlReading;
/// [`KlReading`] as a metric.
pub type Kl = StepMetric<KlReading>;

impl Reading for KlReading {
    type Input = StepStats;
    const NAME: &'static str = "KL";
    const HIGHER_IS_BETTER: bool = false;

    fn read(input: &StepStats) -> (f64, u64) {
        (input.grpo.unwrap_or_default().kl, input.tokens)
    }
}

/// Mean tokens of a completion, in GRPO.
#[derive(Clone)]
pub struct CompletionLengthReading;
/// [`CompletionLengthReading`] as a metric.
pub type CompletionLength = StepMetric<CompletionLengthReading>;

impl Reading for CompletionLengthReading {
    type Input = StepStats;
    const NAME: &'static str = "Completion length";
    const HIGHER_IS_BETTER: bool = false;

    fn read(input: &StepStats) -> (f64, u64) {
        (input.grpo.unwrap_or_default().completion_length, 1)
    }
}
