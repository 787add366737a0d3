//! The sizes of layers whose states take the place of attention.

use crate::flops::LinearFlops;

/// Layers with linear attention (Gated DeltaNet).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Linear {
    /// Which layers; the others have attention.
    pub layers: Vec<usize>,
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values.
    pub value_heads: usize,
    /// Query and key head dimension.
    pub key_dim: usize,
    /// Value head dimension.
    pub value_dim: usize,
    /// Positions that the convolution sees.
    pub kernel: usize,
}

impl Linear {
    pub(super) fn flops(&self, hidden: usize, layers: usize) -> LinearFlops {
        let (keys, values) = (self.key_heads * self.key_dim, self.value_heads * self.value_dim);
        LinearFlops {
            layers,
            weights: hidden * (2 * keys + 3 * values + 2 * self.value_heads) + self.kernel * (2 * keys + values),
            state_flops: 8 * self.value_heads * self.key_dim * self.value_dim,
        }
    }
}

/// Layers of Mamba-2.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateSpace {
    /// Which layers.
    pub layers: Vec<usize>,
    /// Heads, each with a state.
    pub heads: usize,
    /// Features of a head.
    pub head_dim: usize,
    /// Groups of heads that share B and C.
    pub groups: usize,
    /// Features of B and of C in a group.
    pub state: usize,
    /// Positions that the convolution sees.
    pub kernel: usize,
    /// The convolution has a bias.
    pub conv_bias: bool,
    /// The projections have biases.
    pub bias: bool,
}

impl StateSpace {
    pub(super) fn flops(&self, hidden: usize, layers: usize) -> LinearFlops {
        let (inner, grouped) = (self.heads * self.head_dim, self.groups * self.state);
        LinearFlops {
            layers,
            weights: hidden * (3 * inner + 2 * grouped + self.heads) + self.kernel * (inner + 2 * grouped),
            state_flops: 7 * inner * self.state,
        }
    }
}
