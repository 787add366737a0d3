//! What is kept of a sequence that is generated, and the sizes of layers whose states take the place of attention.

use super::Decoder;
use host::flops::LinearFlops;

impl Decoder {
    /// Features of a position that one of `tp` ranks has in the cache of a layer with attention: keys and values of its
    /// heads, or the latent and the rotated key, which all ranks have.
    pub fn cached_features(&self, tp: usize) -> usize {
        match &self.latent {
            Some(latent) => latent.keys + latent.rotated,
            None => 2 * self.kv_heads.div_ceil(tp) * self.head_dim,
        }
    }

    /// Bytes of the states that one of `tp` ranks keeps of a sequence, whatever its length, if elements have so many bytes.
    pub fn state_bytes(&self, tp: usize, element: usize) -> usize {
        let linear = self.linear.as_ref().map_or(0, |linear| linear.kept(tp, element));
        linear + self.mamba.as_ref().map_or(0, |mamba| mamba.kept(tp, element))
    }
}

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
    /// Bytes of what a rank keeps of a sequence that it generates: states in at least fp32, and what convolutions still see.
    fn kept(&self, tp: usize, element: usize) -> usize {
        let (keys, values) = (self.key_heads * self.key_dim, self.value_heads * self.value_dim);
        let seen = (self.kernel - 1) * (2 * keys + values) * element;
        self.layers.len() * (self.key_dim * values * element.max(4) + seen) / tp
    }

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
    /// Bytes of what a rank keeps of a sequence that it generates: states in at least fp32, and what convolutions still see.
    fn kept(&self, tp: usize, element: usize) -> usize {
        let (inner, grouped) = (self.heads * self.head_dim, self.groups * self.state);
        let convolved = inner / tp + 2 * grouped / tp.min(self.groups);
        self.layers.len() * (inner / tp * self.state * element.max(4) + (self.kernel - 1) * convolved * element)
    }

    pub(super) fn flops(&self, hidden: usize, layers: usize) -> LinearFlops {
        let (inner, grouped) = (self.heads * self.head_dim, self.groups * self.state);
        LinearFlops {
            layers,
            weights: hidden * (3 * inner + 2 * grouped + self.heads) + self.kernel * (inner + 2 * grouped),
            state_flops: 7 * inner * self.state,
        }
    }
}
