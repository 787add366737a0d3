//! What a layer with linear attention keeps of a sequence while tokens are generated.

use burn::tensor::Tensor;

/// What a layer with linear attention remembers of the positions that it has read.
#[derive(Clone, Debug)]
pub(crate) struct RecurrentState {
    /// The states of the rank's heads, as the layer's operation has them, samples first.
    pub(crate) heads: Tensor<4>,
    /// What the convolution still sees, `[kernel - 1, b, features]`.
    pub(crate) convolution: Tensor<3>,
}

impl RecurrentState {
    /// Those of several sequences as of one batch.
    pub(crate) fn side_by_side(states: Vec<Self>) -> Self {
        let (heads, convolution) = states.into_iter().map(|state| (state.heads, state.convolution)).unzip();
        Self { heads: Tensor::cat(heads, 0), convolution: Tensor::cat(convolution, 1) }
    }

    /// Those of each sequence of a batch of `samples`.
    pub(crate) fn apart(self, samples: usize) -> impl Iterator<Item = Self> {
        (0..samples).map(move |sample| Self {
            heads: self.heads.clone().narrow(0, sample, 1),
            convolution: self.convolution.clone().narrow(1, sample, 1),
        })
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device};

    use super::super::{Chunk, Outputs, PagedKvCache};
    use super::*;

    fn chunk(block: u32) -> Chunk {
        Chunk { tokens: vec![1], positions: 5..6, blocks: vec![block], outputs: Outputs::Last }
    }

    #[test]
    fn states_are_given_back_in_all_layers() {
        let mut cache = PagedKvCache::new(4, 8);
        let heads = || Tensor::zeros([1, 1, 1, 1], (&Device::flex(), DType::F32));
        let convolution = || Tensor::zeros([1, 1, 1], (&Device::flex(), DType::F32));
        for (layer, block) in [(0, 1), (0, 3), (2, 1), (2, 3)] {
            let state = RecurrentState { heads: heads(), convolution: convolution() };
            cache.put_state(layer, &chunk(block), state);
        }
        cache.release(&[2, 3]);
        let mut kept: Vec<(usize, u32)> = cache.states.keys().copied().collect();
        kept.sort_unstable();
        assert_eq!(kept, [(0, 1), (2, 1)]);
    }
}
