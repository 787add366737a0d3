//! What a layer keeps while tokens are generated.

use burn::tensor::Tensor;

/// What a layer remembers of the positions that it has read.
#[derive(Clone, Debug)]
pub struct GatedDeltaState {
    /// The states of the rank's heads, `[b, h, key_dim, value_dim]`.
    pub(super) heads: Tensor<4>,
    /// What the convolution still sees, `[kernel - 1, b, features]`.
    pub(super) convolution: Tensor<3>,
}
