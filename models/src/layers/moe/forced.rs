//! Random logits instead of a router's, so that experts are used alike: Megatron-LM's
//! `--moe-router-force-load-balancing` (`apply_random_logits` in `megatron/core/transformer/moe/moe_utils.py`). For
//! measurements: nothing is learned about which experts to choose.

use std::sync::Arc;

use backend_dist::shard::Init;
use burn::tensor::{Tensor, TensorData};
use parking_lot::Mutex;

/// The values that replace the logits of a layer, the same in every pass.
#[derive(Clone, Debug)]
pub(super) struct Forced {
    name: String,
    kept: Arc<Mutex<Option<Tensor<2>>>>,
}

impl Forced {
    /// For the router `name`, with other values on each `rank`.
    pub fn new(name: &str, rank: usize) -> Self {
        Self { name: format!("{name}.forced.{rank}"), kept: Arc::default() }
    }

    /// Random values for the `logits [tokens, experts]`, which receive their gradients.
    pub fn replace(&self, logits: Tensor<2>) -> Tensor<2> {
        let values = self.values(&logits.clone().without_autodiff());
        let values = if logits.is_autodiff() { Tensor::from_inner(values) } else { values };
        // The difference is zero to the bit.
        (logits.clone() - logits.detach()) + values
    }

    fn values(&self, like: &Tensor<2>) -> Tensor<2> {
        let mut kept = self.kept.lock();
        if let Some(values) = kept.as_ref().filter(|values| values.dims() == like.dims()) {
            return values.clone();
        }
        let [tokens, experts] = like.dims();
        let value = |index| Init::Uniform { low: -1.0, high: 1.0 }.value(0, &self.name, index);
        let values: Vec<f64> = (0..(tokens * experts) as u64).map(value).collect();
        let values = Tensor::from_data(TensorData::new(values, [tokens, experts]), (&like.device(), like.dtype()));
        kept.insert(values).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Device;

    #[test]
    fn experts_are_used_alike_and_gradients_go_on() {
        let device = Device::flex().autodiff();
        let logits = Tensor::<2>::ones([512, 8], &device).require_grad();
        let forced = Forced::new("router", 1);
        let values = forced.replace(logits.clone());
        let inner = forced.replace(logits.clone().inner());
        assert_eq!(values.clone().into_data(), inner.into_data());
        let best = values.clone().argmax(1).into_data().convert::<i64>();
        let counts = best.iter::<i64>().fold([0; 8], |mut counts, expert| {
            counts[expert as usize] += 1;
            counts
        });
        assert!(counts.iter().all(|count| (44..=84).contains(count)), "{counts:?}");
        let gradient = logits.grad(&(values * 3.0).sum().backward()).unwrap();
        assert!(gradient.into_data().iter::<f64>().all(|slope| slope == 3.0));
    }
}
