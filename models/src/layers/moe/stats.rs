//! What the MoE layers of a rank count while they route: how full the experts are, dropped tokens, how sure the router
//! is, auxiliary losses. For reports alone: nothing that is computed depends on it. The engine takes it once per step.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::tensor::{DType, Tensor};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

/// A loss that pushes a router towards balance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Auxiliary {
    /// Of the shares of tokens and probabilities of the experts (<https://arxiv.org/abs/2101.03961>).
    LoadBalancing,
    /// Of the size of the router's logits (<https://arxiv.org/abs/2202.08906>).
    Z,
}

/// Counts of one layer on one rank, over the forward passes since they were taken last.
#[derive(Clone, Debug, Default)]
pub struct Layer {
    /// Copies of this rank's tokens that were sent to each expert, before any was dropped.
    tokens: Vec<u64>,
    routed: u64,
    dropped: u64,
    /// On the device.
    entropy: Option<Tensor<1>>,
    /// On the device, and how many of them.
    auxiliary: BTreeMap<Auxiliary, (Tensor<1>, u64)>,
}

/// What a rank has counted in one layer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Counts {
    /// The layer, counted over the whole model.
    pub layer: usize,
    /// Copies of this rank's tokens that were sent to each expert, before any was dropped.
    pub tokens: Vec<u64>,
    /// Tokens that this rank has routed.
    pub routed: u64,
    /// Copies that were dropped.
    pub dropped: u64,
    /// Sum over its tokens of the entropy of the router's softmax over all experts, in nats.
    pub entropy: f64,
    /// Sum over forward passes of the loss without its coefficient, and their number.
    pub auxiliary: BTreeMap<Auxiliary, (f64, u64)>,
}

impl Layer {
    /// Adds `count` of this rank's tokens, of which `tokens[e]` copies were sent to expert `e` of all experts.
    pub fn routed(&mut self, tokens: &[usize], count: usize) {
        self.tokens.resize(tokens.len(), 0);
        self.tokens.iter_mut().zip(tokens).for_each(|(sum, count)| *sum += *count as u64);
        self.routed += count as u64;
    }

    /// Adds copies that no expert had room for.
    pub fn dropped(&mut self, copies: usize) {
        self.dropped += copies as u64;
    }

    /// Adds the sum over this rank's tokens of the entropy of the router's softmax, without a graph.
    pub fn entropy(&mut self, sum: Tensor<1>) {
        self.entropy = Some(added(self.entropy.take(), sum));
    }

    /// Adds an auxiliary loss of one forward pass without its coefficient and without a graph.
    pub fn auxiliary(&mut self, kind: Auxiliary, loss: Tensor<1>) {
        let (sum, count) = self.auxiliary.remove(&kind).unzip();
        self.auxiliary.insert(kind, (added(sum, loss), count.unwrap_or(0) + 1));
    }
}

fn added(sum: Option<Tensor<1>>, value: Tensor<1>) -> Tensor<1> {
    let value = value.cast(DType::F32);
    match sum {
        Some(sum) => sum + value,
        None => value,
    }
}

/// The counts of a rank's layers, each numbered over the whole model. Clones are the same counts.
#[derive(Clone, Debug, Default)]
pub struct RouterStats(Arc<Mutex<BTreeMap<usize, Layer>>>);

impl RouterStats {
    /// Lets `count` add to the counts of a layer.
    pub fn record(&self, layer: usize, count: impl FnOnce(&mut Layer)) {
        count(self.0.lock().entry(layer).or_default());
    }

    /// The counts by layer; counting starts anew. Waits for the device once.
    pub fn take(&self) -> Vec<Counts> {
        let layers = std::mem::take(&mut *self.0.lock());
        counts(layers)
    }
}

/// What the layers have counted, on the host.
fn counts(layers: BTreeMap<usize, Layer>) -> Vec<Counts> {
    let tensors = layers.values().flat_map(|layer| {
        let auxiliary = layer.auxiliary.values().map(|(sum, _)| sum);
        layer.entropy.iter().chain(auxiliary).cloned()
    });
    let tensors: Vec<Tensor<1>> = tensors.collect();
    let values =
        if tensors.is_empty() { Vec::new() } else { Tensor::cat(tensors, 0).into_data().iter::<f64>().collect() };
    let mut values = values.into_iter();
    let mut next = || values.next().expect("one value for each tensor");
    let of_layer = |(index, layer): (usize, Layer)| Counts {
        layer: index,
        tokens: layer.tokens,
        routed: layer.routed,
        dropped: layer.dropped,
        entropy: layer.entropy.map_or(0.0, |_| next()),
        auxiliary: layer.auxiliary.into_iter().map(|(kind, (_, count))| (kind, (next(), count))).collect(),
    };
    layers.into_iter().map(of_layer).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Device;

    fn value(value: f64) -> Tensor<1> {
        Tensor::from_data([value], &Device::flex())
    }

    #[test]
    fn passes_add_up() {
        let stats = RouterStats::default();
        assert!(stats.take().is_empty());
        for pass in 1..3 {
            stats.record(3, |layer| {
                layer.routed(&[pass, 0, 4], 2);
                layer.entropy(value(0.5));
                layer.auxiliary(Auxiliary::Z, value(4.0));
                layer.auxiliary(Auxiliary::LoadBalancing, value(pass as f64));
            });
        }
        stats.record(0, |layer| layer.dropped(1));
        let first = Counts { dropped: 1, ..Counts::default() };
        let second = Counts {
            layer: 3,
            tokens: vec![3, 0, 8],
            routed: 4,
            entropy: 1.0,
            auxiliary: [(Auxiliary::LoadBalancing, (3.0, 2)), (Auxiliary::Z, (8.0, 2))].into(),
            ..Counts::default()
        };
        assert_eq!(stats.take(), [first, second]);
        assert!(stats.take().is_empty());
    }
}
