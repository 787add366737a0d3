//! Dropout whose mask depends on the position in the global batch, not on the layout.

use backend_dist::ops::{DropoutMask, dropout};
use backend_dist::shard::stable_hash;
use burn::tensor::Tensor;

use crate::micro_batch::{MicroBatch, sub_ranges};
use crate::param::TensorParallel;

/// Zeroes a share of the elements of activations between tensor parallel regions, and scales the others up.
#[derive(Clone, Debug)]
pub struct Dropout {
    share: f64,
    stream: u64,
    parallel: TensorParallel,
}

/// More samples than a global batch ever has: a mask must not depend on how many there are.
const SAMPLES: usize = 1 << 32;

impl Dropout {
    /// Dropout of a share in `0..1` of the elements; `name` tells it from the model's other dropouts.
    pub fn new(parallel: &TensorParallel, name: &str, share: f64) -> Self {
        Self { share, stream: stable_hash(name), parallel: parallel.clone() }
    }

    /// Drops elements of `[s, b, hidden]`, or of the rank's part of the sequence. Without a key nothing is dropped.
    pub fn forward(&self, x: Tensor<3>, batch: &MicroBatch) -> Tensor<3> {
        let Some(key) = batch.dropout.filter(|_| self.share > 0.0) else { return x };
        let [positions, _, hidden] = x.dims();
        let region = self.parallel.sequence_length(positions);
        let pieces = sub_ranges(&batch.positions(region), self.parallel.own_positions(positions));
        let (offset, global) = ([0, key.first_sample, 0], [batch.sequence_length(region), SAMPLES, hidden]);
        dropout(x, self.share, DropoutMask::of_chunks(key.seed ^ self.stream, pieces, &offset, &global))
    }
}
