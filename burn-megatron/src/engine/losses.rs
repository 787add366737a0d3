//! The losses of a rank's micro-batches, read when the device has nothing to lose by it.

use super::local_batch::LocalBatch;
use burn::tensor::Tensor;

/// Losses of micro-batches: the sum of those that were read, and those that are still on the device.
#[derive(Default)]
pub(super) struct Losses {
    /// Counted losses, in the order of the passes.
    pub sum: f64,
    /// Micro-batch and losses `[sequences, seq]`.
    waiting: Vec<(usize, Tensor<2>)>,
}

impl Losses {
    /// Adds the losses of micro-batches.
    pub fn extend(&mut self, losses: impl IntoIterator<Item = (usize, Tensor<2>)>) {
        self.waiting.extend(losses);
    }

    /// Reads what is waiting, with one wait for the device. The error has the first micro-batch whose losses are not
    /// finite, and their mean.
    pub fn read(self, batches: &[LocalBatch]) -> Result<Self, (usize, f64)> {
        let mut bad = None;
        let read = self.read_each(batches, |micro_batch, sum| {
            if !sum.is_finite() {
                bad.get_or_insert((micro_batch, sum / batches[micro_batch].tokens.counted().max(1) as f64));
            }
        });
        bad.map_or(Ok(read), Err)
    }

    /// [`Losses::read`], whatever they are.
    pub fn read_any(self, batches: &[LocalBatch]) -> Self {
        self.read_each(batches, |_, _| ())
    }

    fn read_each(mut self, batches: &[LocalBatch], mut see: impl FnMut(usize, f64)) -> Self {
        if self.waiting.is_empty() {
            return self;
        }
        let (places, losses): (Vec<_>, Vec<_>) = self.waiting.drain(..).unzip();
        // Rows of micro-batches need not be of one length.
        let flat = |losses: Tensor<2>| losses.flatten::<1>(0, 1);
        let values: Vec<f64> = Tensor::cat(losses.into_iter().map(flat).collect(), 0).into_data().iter().collect();
        let mut values = values.into_iter();
        for micro_batch in places {
            let batch = &batches[micro_batch].tokens;
            let sum = batch.masked_sum(values.by_ref().take(batch.tokens.len()));
            see(micro_batch, sum);
            self.sum += sum;
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{DocumentConfig, TokenBatch};
    use burn::tensor::{Device, TensorData};

    #[test]
    fn sums_are_read_at_once_and_the_bad_micro_batch_is_named() {
        let batch = TokenBatch { mask: Some(vec![true, false]), ..TokenBatch::from_sequences(&[1, 2, 3], 2) };
        let batches: Vec<LocalBatch> =
            (0..3).map(|_| LocalBatch::new(&batch, None, DocumentConfig::default())).collect();
        let losses =
            |values: [f32; 2]| Tensor::<2>::from_data(TensorData::new(values.to_vec(), [1, 2]), &Device::flex());
        let mut all = Losses::default();
        all.extend([(0, losses([1.0, f32::NAN])), (1, losses([2.0, 8.0]))]);
        let mut all = all.read(&batches).expect("what does not count may be anything");
        assert_eq!(all.sum, 3.0);
        all.extend([(2, losses([f32::INFINITY, 0.0]))]);
        assert_eq!(all.read(&batches).err(), Some((2, f64::INFINITY)));
    }
}
