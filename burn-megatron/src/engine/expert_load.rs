//! How the experts of a model were used in a step.

use models::layers::moe::stats::{Auxiliary, Counts};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// How the experts of one layer were used in a step, over all ranks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ExpertLoad {
    /// The layer, counted over the whole model.
    pub layer: usize,
    /// Copies of tokens that the router has sent to each expert, before any was dropped.
    pub tokens: Vec<u64>,
    /// Tokens of the step.
    pub token_count: u64,
    /// Copies that no expert had room for.
    pub dropped: u64,
    /// Mean over tokens of the entropy of the router's softmax over all experts, in nats: 0 where it is sure, the
    /// logarithm of the number of experts where it is not.
    pub entropy: f64,
    /// Means over micro-batches of the auxiliary losses, without their coefficients.
    pub auxiliary: BTreeMap<Auxiliary, f64>,
}

/// The layers of a step in a few numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertSummary {
    /// The fullest expert's tokens over the mean, in the worst layer: 1 is perfect balance.
    pub balance: f64,
    /// Share of the copies of tokens that were dropped, over all layers.
    pub dropped: f64,
    /// Mean over layers of the routers' entropy, in nats.
    pub entropy: f64,
    /// Mean over layers of the load balancing loss without its coefficient; 1 is perfect balance.
    pub load_balancing: Option<f64>,
    /// Mean over layers of the z-loss without its coefficient.
    pub z: Option<f64>,
}

impl ExpertLoad {
    /// The sum of the counts of all ranks that hold a layer, each of its own tokens.
    ///
    /// # Panics
    /// If there are no counts.
    pub fn sum(ranks: &[&Counts]) -> Self {
        let first = ranks.first().expect("a layer is on some rank");
        let mut load = Self { layer: first.layer, ..Self::default() };
        let mut auxiliary: BTreeMap<Auxiliary, (f64, u64)> = BTreeMap::new();
        for counts in ranks {
            load.tokens.resize(load.tokens.len().max(counts.tokens.len()), 0);
            load.tokens.iter_mut().zip(&counts.tokens).for_each(|(sum, count)| *sum += count);
            load.token_count += counts.routed;
            load.dropped += counts.dropped;
            load.entropy += counts.entropy;
            for (kind, (sum, count)) in &counts.auxiliary {
                let (all, passes) = auxiliary.entry(*kind).or_default();
                *all += sum;
                *passes += count;
            }
        }
        load.entropy /= load.token_count.max(1) as f64;
        load.auxiliary = auxiliary.into_iter().map(|(kind, (sum, count))| (kind, sum / count.max(1) as f64)).collect();
        load
    }

    /// The fullest expert's tokens over the mean; 1 if there were none.
    pub fn balance(&self) -> f64 {
        let (most, all) = (self.tokens.iter().max().copied().unwrap_or(0), self.tokens.iter().sum::<u64>());
        if all == 0 { 1.0 } else { most as f64 * self.tokens.len() as f64 / all as f64 }
    }
}

impl ExpertSummary {
    /// Of all layers with experts; `None` if there are none.
    pub fn of(layers: &[ExpertLoad]) -> Option<Self> {
        if layers.is_empty() {
            return None;
        }
        let mean = |values: Vec<f64>| (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64);
        let auxiliary = |kind| mean(layers.iter().filter_map(|layer| layer.auxiliary.get(&kind).copied()).collect());
        let copies: u64 = layers.iter().flat_map(|layer| &layer.tokens).sum();
        let dropped: u64 = layers.iter().map(|layer| layer.dropped).sum();
        Some(Self {
            balance: layers.iter().map(ExpertLoad::balance).fold(1.0, f64::max),
            dropped: dropped as f64 / copies.max(1) as f64,
            entropy: mean(layers.iter().map(|layer| layer.entropy).collect()).expect("there is a layer"),
            load_balancing: auxiliary(Auxiliary::LoadBalancing),
            z: auxiliary(Auxiliary::Z),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(tokens: &[u64], entropy: f64, loss: f64) -> Counts {
        Counts {
            layer: 2,
            tokens: tokens.to_vec(),
            routed: 4,
            dropped: 1,
            entropy,
            auxiliary: [(Auxiliary::LoadBalancing, (loss, 2))].into(),
        }
    }

    #[test]
    fn ranks_add_up() {
        let (a, b) = (counts(&[6, 1, 1], 2.0, 2.0), counts(&[4, 3, 1], 6.0, 4.0));
        let load = ExpertLoad::sum(&[&a, &b]);
        let auxiliary = [(Auxiliary::LoadBalancing, 1.5)].into();
        let expected =
            ExpertLoad { layer: 2, tokens: vec![10, 4, 2], token_count: 8, dropped: 2, entropy: 1.0, auxiliary };
        assert_eq!(load, expected);
        assert_eq!(load.balance(), 10.0 * 3.0 / 16.0);
        assert_eq!(ExpertLoad { tokens: vec![0; 4], ..load.clone() }.balance(), 1.0);
        let even = ExpertLoad { tokens: vec![5, 5, 6], auxiliary: BTreeMap::new(), ..load.clone() };
        let summary = ExpertSummary::of(&[load, even]).unwrap();
        assert_eq!((summary.balance, summary.entropy), (1.875, 1.0));
        assert_eq!((summary.dropped, summary.load_balancing, summary.z), (4.0 / 32.0, Some(1.5), None));
        assert_eq!(ExpertSummary::of(&[]), None);
    }
}
