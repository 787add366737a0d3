//! Documents of unequal lengths in a measurement: their distribution, and how evenly they load the ranks.

use std::fmt;
use std::str::FromStr;

use models::ModelConfig;
use serde::{Deserialize, Serialize};

use super::random::uniform;
use crate::config::RunConfig;
use crate::data::TokenDataset;
use crate::engine::packed_length;
use crate::schedule::Effort;
use crate::schedule::dynamic_context::{DynamicContext, TooLong};

/// Distribution of document lengths in random tokens: `lognormal:MEAN,SIGMA`, as in Megatron's mock data of
/// variable length (`--sft-mock-dataset-config-json`, there with a `lognormal_sigma` of 1.1).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DocumentLengths {
    /// Mean, tokens.
    pub mean: f64,
    /// Standard deviation of the lengths' logarithm.
    pub sigma: f64,
}

impl DocumentLengths {
    /// The length that belongs to a random number; the same number always means the same length.
    pub fn length(&self, random: u64) -> usize {
        let (radius, angle) = (1.0 - uniform(random), uniform(random ^ 0x5851_f42d_4c95_7f2d));
        // Box and Muller's transform, https://doi.org/10.1214/aoms/1177706645.
        let normal = (-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos();
        let median = self.mean.ln() - self.sigma * self.sigma / 2.0;
        (median + self.sigma * normal).exp().round().max(1.0) as usize
    }
}

impl FromStr for DocumentLengths {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers = text.strip_prefix("lognormal:").and_then(|numbers| numbers.split_once(','));
        let parsed = numbers.and_then(|(mean, sigma)| Some((mean.parse().ok()?, sigma.parse().ok()?)));
        match parsed {
            Some((mean, sigma)) if mean >= 1.0 && f64::is_finite(mean) && (0.0..=8.0).contains(&sigma) => {
                Ok(Self { mean, sigma })
            }
            _ => Err(format!(
                "`{text}` is not lognormal:MEAN,SIGMA with a mean of at least 1 token and a sigma from 0 to 8, such as \
                 lognormal:4096,1.1"
            )),
        }
    }
}

impl fmt::Display for DocumentLengths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lognormal:{},{}", self.mean, self.sigma)
    }
}

/// The documents of the measured steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DocumentReport {
    /// Documents of a step, on the mean.
    pub per_step: f64,
    /// Mean length.
    pub mean: f64,
    /// Half are shorter.
    pub median: usize,
    /// The longest.
    pub longest: usize,
    /// Length of a document's tokens, on the mean: what attention costs as.
    pub of_a_token: f64,
    /// Share of the computed tokens that are padding.
    pub padding: f64,
    /// By assignment of documents to ranks: simulated time of a step, compared with equally loaded ranks without
    /// communication. The measured assignment comes first.
    pub simulated: Vec<(String, f64)>,
}

impl DocumentReport {
    /// Of the samples of `data` from `first` on that `steps` steps of `config` take; `None` where these are one
    /// document each. `on_gpus` pads sequences to more.
    pub fn of(config: &RunConfig, data: &dyn TokenDataset, first: usize, steps: usize, on_gpus: bool) -> Option<Self> {
        let training = &config.training;
        if !config.data.reset_attention_mask || data.is_empty() || steps == 0 {
            return None;
        }
        let rows: Vec<Vec<usize>> =
            (first..first + steps * training.global_batch).map(|index| row(data, index)).collect::<Option<_>>()?;
        let mut lengths = rows.concat();
        lengths.sort_unstable();
        let tokens: usize = lengths.iter().sum();
        let squares: f64 = lengths.iter().map(|length| (*length as f64).powi(2)).sum();

        let assignments = Assignments { config, effort: Effort::of_width(config.model.config.dims().hidden), on_gpus };
        let steps: Vec<Vec<Assignment>> = rows.chunks(training.global_batch).map(|rows| assignments.of(rows)).collect();
        let mean = |of: &dyn Fn(&Vec<Assignment>) -> f64| steps.iter().map(of).sum::<f64>() / steps.len() as f64;
        let names = steps[0].iter().map(|assignment| assignment.name.clone()).enumerate();
        Some(Self {
            per_step: lengths.len() as f64 / steps.len() as f64,
            mean: tokens as f64 / lengths.len() as f64,
            median: lengths[lengths.len() / 2],
            longest: *lengths.last()?,
            of_a_token: squares / tokens as f64,
            padding: mean(&|step| step[0].padding),
            simulated: names.map(|(index, name)| (name, mean(&|step| step[index].slowdown))).collect(),
        })
    }
}

impl DocumentReport {
    /// Whether `context.dynamic` can assign the documents of the first `steps` steps to ranks. The error has the first
    /// that is too long for all ranks together.
    pub fn check(config: &RunConfig, data: &dyn TokenDataset, steps: usize) -> Result<(), TooLong> {
        let (context, layout) = (&config.context, &config.parallel);
        let Some(most) = context.max_tokens_per_rank.filter(|_| context.dynamic && !data.is_empty()) else {
            return Ok(());
        };
        let effort = Effort::of_width(config.model.config.dims().hidden);
        let mut rows = (0..steps * config.training.global_batch).filter_map(|index| row(data, index));
        rows.try_for_each(|row| DynamicContext::new(&row, layout.cp * layout.dp, most, effort).map(drop))
    }
}

/// Lengths of the documents of a sample.
fn row(data: &dyn TokenDataset, index: usize) -> Option<Vec<usize>> {
    let sample = data.sample(index % data.len());
    let (starts, end) = (sample.documents?, sample.tokens.len());
    let ends = starts[1..].iter().copied().chain([end]);
    Some(starts.iter().zip(ends).map(|(start, end)| end - start).collect())
}

/// The assignments of documents to ranks that a layout allows.
struct Assignments<'a> {
    config: &'a RunConfig,
    effort: Effort,
    on_gpus: bool,
}

/// An assignment, with its simulated time compared with equally loaded ranks.
struct Assignment {
    name: String,
    slowdown: f64,
    padding: f64,
}

impl Assignments<'_> {
    /// The measured assignment first.
    fn of(&self, rows: &[Vec<usize>]) -> Vec<Assignment> {
        let (layout, micro) = (&self.config.parallel, self.config.training.micro_batch);
        let ranks = layout.cp * layout.dp;
        let lengths = rows.concat();
        let ideal = self.effort.ideal(lengths.iter().copied(), ranks);
        let seq: usize = rows[0].iter().sum();
        let fixed = |cp: usize| {
            let dp = ranks / cp;
            let possible = seq.is_multiple_of(2 * cp) || cp == 1;
            let time = possible.then(|| self.effort.of_packed(rows, micro, dp, cp));
            time.map(|time| Assignment { name: format!("CP{cp} DP{dp}"), slowdown: time / ideal, padding: 0.0 })
        };
        let context = &self.config.context;
        let most = context.max_tokens_per_rank.filter(|_| context.dynamic);
        let dynamic = most.and_then(|most| {
            let packs = self.config.model.config.dims().experts.is_none();
            let assign = if packs { DynamicContext::new } else { DynamicContext::apart };
            let plan = assign(&lengths, ranks, most, self.effort).ok()?;
            let padded = |cp, tokens| packed_length(layout, cp, tokens, self.on_gpus);
            let computed: usize = plan.order.iter().map(|row| padded(row.ranks.len(), row.tokens)).sum();
            let padding = 1.0 - lengths.iter().sum::<usize>() as f64 / computed as f64;
            Some(Assignment { name: format!("dynamic:{most}"), slowdown: plan.makespan() / ideal, padding })
        });
        let own = if dynamic.is_some() { None } else { fixed(layout.cp) };
        let others = [ranks, 1].into_iter().filter(|cp| own.is_none() || *cp != layout.cp);
        let others: Vec<usize> = if ranks == 1 { Vec::new() } else { others.collect() };
        dynamic.into_iter().chain(own).chain(others.into_iter().filter_map(fixed)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_have_the_mean_and_the_skew_that_are_asked_for() {
        let lengths: DocumentLengths = "lognormal:4096,1.1".parse().unwrap();
        assert_eq!(lengths.to_string(), "lognormal:4096,1.1");
        let mut drawn: Vec<usize> = (0..100_000).map(|random| lengths.length(random)).collect();
        drawn.sort_unstable();
        let mean = drawn.iter().sum::<usize>() as f64 / drawn.len() as f64;
        // The median of a log-normal distribution is its mean times exp(-sigma²/2).
        assert!((mean / 4096.0 - 1.0).abs() < 0.02, "{mean}");
        assert!((drawn[50_000] as f64 / 2236.7 - 1.0).abs() < 0.02, "{}", drawn[50_000]);
        assert!((drawn[84_134] as f64 / (2236.7 * 1.1f64.exp()) - 1.0).abs() < 0.03, "{}", drawn[84_134]);
        for wrong in ["lognormal:4096", "lognormal:0,1", "lognormal:10,-1", "uniform:1,2", "lognormal:inf,1"] {
            assert!(wrong.parse::<DocumentLengths>().unwrap_err().contains("lognormal:4096,1.1"), "{wrong}");
        }
    }
}
