//! What a step says of its gradients, where that is asked for.

use std::collections::BTreeMap;

/// Of the gradients of one step, before clipping; equal on all ranks.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GradientStats {
    /// L2 norms of the gradients of `embedding`, `layers.N` and `head`, with
    /// [`layer_norms`](super::EngineConfig::layer_norms).
    pub norms: BTreeMap<String, f64>,
    /// Elements that are zero, with [`num_zeros_in_grad`](super::EngineConfig::num_zeros_in_grad).
    pub zeros: Option<u64>,
}

impl GradientStats {
    /// From sums of squares by name, of which there may be several, and the factor of the gradients.
    pub(super) fn of(squares: impl IntoIterator<Item = (String, f64)>, scale: f64, zeros: Option<u64>) -> Self {
        let mut norms = BTreeMap::new();
        squares.into_iter().for_each(|(name, sum)| *norms.entry(name).or_insert(0.0) += sum);
        norms.values_mut().for_each(|sum| *sum = sum.sqrt() * scale);
        Self { norms, zeros }
    }
}
