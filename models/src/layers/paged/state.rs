//! What a layer with linear attention keeps of a sequence while tokens are generated.

use burn::tensor::Tensor;

/// What a layer with linear attention remembers of the positions that it has read.
#[derive(Clone, Debug)]
pub(crate) struct RecurrentState {
    /// The states of the rank's heads, `[b, h, key_dim, value_dim]`.
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
