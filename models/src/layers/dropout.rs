//! Dropout whose mask depends on the position in the global batch, not on the layout.

use backend_dist::shard::{philox4x32, stable_hash};
use burn::tensor::{Tensor, TensorData};

use crate::param::TensorParallel;

/// What one forward pass draws its masks from. Two passes with equal keys drop the same elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DropoutKey {
    /// Seed of the training step: another one for every step, the same on all ranks.
    pub seed: u64,
    /// Index of the micro-batch's first sample in the global batch.
    pub first_sample: usize,
}

/// Zeroes a share of the elements of activations between tensor parallel regions, and scales the others up.
#[derive(Clone, Debug)]
pub struct Dropout {
    share: f64,
    stream: u64,
    parallel: TensorParallel,
}

impl Dropout {
    /// Dropout of a share in `0..1` of the elements; `name` tells it from the model's other dropouts.
    pub fn new(parallel: &TensorParallel, name: &str, share: f64) -> Self {
        Self { share, stream: stable_hash(name), parallel: parallel.clone() }
    }

    /// Drops elements of `[s, b, hidden]`, or of the rank's part of the sequence. Without a key nothing is dropped.
    pub fn forward(&self, x: Tensor<3>, key: Option<&DropoutKey>) -> Tensor<3> {
        let Some(key) = key.filter(|_| self.share > 0.0) else { return x };
        let [rows, batch, hidden] = x.dims();
        let (first, seq) = match self.parallel.sequence {
            true => (rows * self.parallel.group.rank(), rows * self.parallel.size()),
            false => (0, rows),
        };
        let mut mask = Vec::with_capacity(rows * batch * hidden);
        for row in first..first + rows {
            for sample in key.first_sample..key.first_sample + batch {
                let start = ((sample * seq + row) * hidden) as u64;
                mask.extend((start..start + hidden as u64).map(|index| self.factor(key.seed, index)));
            }
        }
        let data = TensorData::new(mask, [rows, batch, hidden]);
        let mask = Tensor::from_data(data, (&x.device(), x.dtype()));
        x * mask
    }

    /// `1 / (1 - share)`, or zero for a dropped element.
    fn factor(&self, seed: u64, index: u64) -> f64 {
        let counter = [index as u32, (index >> 32) as u32, self.stream as u32, (self.stream >> 32) as u32];
        let draw = f64::from(philox4x32(counter, [seed as u32, (seed >> 32) as u32])[0]) / f64::from(u32::MAX);
        if draw < self.share { 0.0 } else { 1.0 / (1.0 - self.share) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use backend_dist::comm::Group;

    #[test]
    fn drops_its_share_and_keeps_the_mean() {
        let parallel = TensorParallel { group: Group::single(), sequence: false };
        let dropout = Dropout::new(&parallel, "embedding", 0.3);
        let count = 100_000;
        let factors: Vec<f64> = (0..count).map(|index| dropout.factor(5, index)).collect();
        let dropped = factors.iter().filter(|factor| **factor == 0.0).count() as f64 / count as f64;
        // Four standard errors.
        assert!((dropped - 0.3).abs() < 0.006, "{dropped}");
        assert!((factors.iter().sum::<f64>() / count as f64 - 1.0).abs() < 0.009);
        let other = Dropout::new(&parallel, "layers.0.mlp", 0.3);
        assert!((0..100).any(|index| other.factor(5, index) != dropout.factor(5, index)));
        assert!((0..100).any(|index| dropout.factor(6, index) != dropout.factor(5, index)));
    }
}
