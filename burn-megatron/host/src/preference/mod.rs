//! Losses of preference tuning over sums of log-probabilities. Pure.
//!
//! With the log-probabilities `p` of the policy and `r` of the reference model of whole answers, their numbers of
//! tokens `n`, chosen `w` and rejected `l`, and `σ` the logistic function, the loss of a pair is
//!
//! | | loss of a pair | from |
//! |---|---|---|
//! | `dpo` | `-(1-ε) log σ(β h) - ε log σ(-β h)`, `h = (p_w - r_w) - (p_l - r_l)` | Rafailov et al., 2023; with ε Mitchell's conservative DPO |
//! | `ipo` | `((p_w - r_w)/n_w - (p_l - r_l)/n_l - 1/(2β))²` | Azar et al., 2023, per token as TRL |
//! | `kto` | `½ λ_w (1 - σ(β (p_w - r_w - z))) + ½ λ_l (1 - σ(β (z - p_l + r_l)))` | Ethayarajh et al., 2024 |
//! | `orpo` | `-p_w/n_w - β log σ(o(p_w/n_w) - o(p_l/n_l))`, `o(a) = a - log(1 - exp(a))` | Hong et al., 2024 |
//! | `simpo` | `-(1-ε) log σ(g) - ε log σ(-g)`, `g = β (p_w/n_w - p_l/n_l) - γ` | Meng et al., 2024 |
//!
//! The loss of a batch is the mean over its pairs. `z`, of KTO alone, is the KL divergence of policy and reference,
//! estimated by the mean of `p - r` over answers to other prompts, at least 0 and without a gradient.
//!
//! A gradient of such a loss is that of a weighted sum of the tokens' losses: each token's weight is minus the
//! derivative by the log-probability of its answer.

mod means;

use serde::{Deserialize, Serialize};

pub use means::{PreferenceMeans, PreferenceSums};

/// Which loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PreferenceLoss {
    /// Direct preference optimisation.
    #[default]
    Dpo,
    /// Identity preference optimisation.
    Ipo,
    /// Kahneman-Tversky optimisation; a chosen answer is desirable, a rejected one is not.
    Kto,
    /// Odds-ratio preference optimisation, with the loss of the chosen answer.
    Orpo,
    /// Simple preference optimisation.
    Simpo,
}

impl PreferenceLoss {
    /// Whether a reference model has a part in it.
    pub fn has_reference(self) -> bool {
        matches!(self, Self::Dpo | Self::Ipo | Self::Kto)
    }

    /// Answers of a pair: KTO has a third, to another prompt.
    pub fn answers(self) -> usize {
        if self == Self::Kto { 3 } else { 2 }
    }
}

/// A loss and its constants.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct PreferenceConfig {
    /// Which loss.
    pub loss: PreferenceLoss,
    /// β; ORPO's λ and IPO's τ.
    pub beta: f64,
    /// ε of DPO and SimPO: the share of pairs that are taken to be the wrong way round.
    pub label_smoothing: f64,
    /// γ of SimPO: the margin that is aimed at.
    pub gamma: f64,
    /// λ_w of KTO.
    pub desirable_weight: f64,
    /// λ_l of KTO.
    pub undesirable_weight: f64,
}

/// DPO with TRL's constants.
impl Default for PreferenceConfig {
    fn default() -> Self {
        Self {
            loss: PreferenceLoss::Dpo,
            beta: 0.1,
            label_smoothing: 0.0,
            gamma: 0.5,
            desirable_weight: 1.0,
            undesirable_weight: 1.0,
        }
    }
}

/// What is known of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Answer {
    /// Its log-probability under the policy.
    pub policy: f64,
    /// The same under the reference model.
    pub reference: f64,
    /// Its tokens.
    pub tokens: usize,
}

impl Answer {
    /// `p - r`.
    pub fn log_ratio(&self) -> f64 {
        self.policy - self.reference
    }

    fn mean(&self) -> f64 {
        self.policy / self.tokens.max(1) as f64
    }
}

/// What follows from a pair.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PairLoss {
    /// The loss.
    pub loss: f64,
    /// Its derivatives by the policy's log-probabilities of the chosen and of the rejected answer.
    pub derivatives: [f64; 2],
    /// What the loss takes for the rewards of the two: `β (p - r)`, or `β p/n` where there is no reference (as TRL).
    pub rewards: [f64; 2],
}

impl PreferenceConfig {
    /// The loss of a pair; `kl` is the `z` of KTO.
    pub fn pair(&self, chosen: &Answer, rejected: &Answer, kl: f64) -> PairLoss {
        let Self { loss, beta, label_smoothing: smoothing, .. } = *self;
        let tokens = [chosen, rejected].map(|answer| answer.tokens.max(1) as f64);
        let rewards = [chosen, rejected].map(|answer| match loss.has_reference() {
            true => beta * answer.log_ratio(),
            false => beta * answer.mean(),
        });
        // Of a loss of the difference of two rewards.
        let of_margin = |margin: f64, scale: [f64; 2]| {
            let loss = (1.0 - smoothing) * softplus(-margin) + smoothing * softplus(margin);
            let slope = sigmoid(margin) - (1.0 - smoothing);
            (loss, [slope * scale[0], -slope * scale[1]])
        };
        let (loss, derivatives) = match loss {
            PreferenceLoss::Dpo => of_margin(rewards[0] - rewards[1], [beta; 2]),
            PreferenceLoss::Simpo => of_margin(rewards[0] - rewards[1] - self.gamma, tokens.map(|n| beta / n)),
            PreferenceLoss::Ipo => {
                let gap = chosen.log_ratio() / tokens[0] - rejected.log_ratio() / tokens[1] - 0.5 / beta;
                (gap * gap, [2.0 * gap / tokens[0], -2.0 * gap / tokens[1]])
            }
            PreferenceLoss::Kto => {
                let [good, bad] = [beta * (chosen.log_ratio() - kl), beta * (kl - rejected.log_ratio())];
                let [desirable, undesirable] = [0.5 * self.desirable_weight, 0.5 * self.undesirable_weight];
                let loss = desirable * sigmoid(-good) + undesirable * sigmoid(-bad);
                let slope = |x: f64| sigmoid(x) * sigmoid(-x) * beta;
                (loss, [-desirable * slope(good), undesirable * slope(bad)])
            }
            PreferenceLoss::Orpo => {
                let means = [chosen.mean(), rejected.mean()];
                let gap = log_odds(means[0]) - log_odds(means[1]);
                // d/da (a - log(1 - exp a)) = 1 / (1 - exp a).
                let slope = -beta * sigmoid(-gap);
                let by = |side: usize| slope / -means[side].min(-TINY).exp_m1() / tokens[side];
                (beta * softplus(-gap) - means[0], [by(0) - 1.0 / tokens[0], -by(1)])
            }
        };
        PairLoss { loss, derivatives, rewards }
    }
}

/// A mean log-probability of 0 has no odds.
const TINY: f64 = 1e-12;

/// `log(p / (1 - p))` of a log-probability.
fn log_odds(log_probability: f64) -> f64 {
    let log_probability = log_probability.min(-TINY);
    log_probability - (-log_probability.exp_m1()).ln()
}

/// `log(1 + exp(x))` without overflow: `-log σ(-x)`.
fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOSSES: [PreferenceLoss; 5] =
        [PreferenceLoss::Dpo, PreferenceLoss::Ipo, PreferenceLoss::Kto, PreferenceLoss::Orpo, PreferenceLoss::Simpo];

    fn config(loss: PreferenceLoss) -> PreferenceConfig {
        PreferenceConfig {
            loss,
            beta: 0.3,
            label_smoothing: 0.1,
            gamma: 0.4,
            desirable_weight: 1.2,
            undesirable_weight: 0.7,
        }
    }

    /// The formulas of the papers, written without what makes them stable.
    fn by_hand(config: &PreferenceConfig, w: &Answer, l: &Answer, z: f64) -> f64 {
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let (beta, epsilon) = (config.beta, config.label_smoothing);
        let smoothed = |x: f64| -(1.0 - epsilon) * sigmoid(x).ln() - epsilon * sigmoid(-x).ln();
        let (nw, nl) = (w.tokens as f64, l.tokens as f64);
        let odds = |p: f64| p / (1.0 - p);
        match config.loss {
            PreferenceLoss::Dpo => smoothed(beta * ((w.policy - w.reference) - (l.policy - l.reference))),
            PreferenceLoss::Ipo => {
                ((w.policy - w.reference) / nw - (l.policy - l.reference) / nl - 1.0 / (2.0 * beta)).powi(2)
            }
            PreferenceLoss::Kto => {
                let desirable = 1.2 * (1.0 - sigmoid(beta * (w.policy - w.reference - z)));
                let undesirable = 0.7 * (1.0 - sigmoid(beta * (z - (l.policy - l.reference))));
                (desirable + undesirable) / 2.0
            }
            PreferenceLoss::Orpo => {
                let ratio = odds((w.policy / nw).exp()) / odds((l.policy / nl).exp());
                -w.policy / nw - beta * sigmoid(ratio.ln()).ln()
            }
            PreferenceLoss::Simpo => smoothed(beta / nw * w.policy - beta / nl * l.policy - 0.4),
        }
    }

    #[test]
    fn losses_are_the_papers_and_derivatives_theirs() {
        for loss in LOSSES {
            let config = config(loss);
            for (policy, reference, kl) in [
                ([-3.0, -1.0], [-2.0, -1.5], 0.0),
                ([-12.0, -40.0], [-15.0, -30.0], 0.8),
                ([-0.2, -0.1], [-4.0, -9.0], 2.5),
            ] {
                let answer =
                    |side: usize, policy: f64| Answer { policy, reference: reference[side], tokens: [4, 7][side] };
                let [w, l] = [answer(0, policy[0]), answer(1, policy[1])];
                let found = config.pair(&w, &l, kl);
                let expected = by_hand(&config, &w, &l, kl);
                assert!(
                    (found.loss - expected).abs() < 1e-12 * expected.abs().max(1.0),
                    "{loss:?}: {found:?} {expected}"
                );
                let step = 1e-6;
                let moved = |side: usize, by: f64| {
                    let shift = |at: usize| answer(at, policy[at] + if at == side { by } else { 0.0 });
                    by_hand(&config, &shift(0), &shift(1), kl)
                };
                for side in 0..2 {
                    let quotient = (moved(side, step) - moved(side, -step)) / (2.0 * step);
                    assert!((quotient - found.derivatives[side]).abs() < 1e-7, "{loss:?} {side}: {quotient} {found:?}");
                }
            }
        }
    }

    #[test]
    fn extremes_stay_finite() {
        for loss in LOSSES {
            for policy in [[0.0, 0.0], [-1e6, -1.0], [-1.0, -1e6]] {
                let answer = |policy| Answer { policy, reference: -1.0, tokens: 3 };
                let pair = config(loss).pair(&answer(policy[0]), &answer(policy[1]), 0.0);
                assert!(pair.loss.is_finite() && pair.derivatives.iter().all(|d| d.is_finite()), "{loss:?}: {pair:?}");
            }
        }
    }
}
