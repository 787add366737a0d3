//! Options of the operations, as plain values.

use super::dropout_mask::{RowKey, threshold};

/// Which GELU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GeluKind {
    /// `x/2 (1 + erf(x/√2))`, exact to rounding.
    Erf,
    /// `x/2 (1 + tanh(√(2/π) (x + 0.044715 x³)))`, the approximation of GPT-2.
    Tanh,
}

/// An RMSNorm without its weight; a number is the epsilon of `w x / √(mean(x²) + eps)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rms {
    /// Added to the mean of squares.
    pub eps: f64,
    /// Whether rows are multiplied with `1 + w` (Gemma, Megatron's `--apply-layernorm-1p`), added in fp32 or wider: in
    /// bf16 the sum would lose the last digits of the weight.
    pub plus_one: bool,
}

impl From<f64> for Rms {
    fn from(eps: f64) -> Self {
        Self { eps, plus_one: false }
    }
}

/// Mask, scale, softcap and dropout of attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionOptions {
    /// Factor of `q·k`, usually `1/√head_dim`.
    pub scale: f64,
    /// Query `i` sees only keys `j <= i`.
    pub causal: bool,
    /// Sliding window: query `i` sees only keys with `|i - j| < window` (itself included), as in Mistral.
    pub window: Option<usize>,
    /// A scaled score `s` becomes `c tanh(s/c)` before mask and softmax, as in Gemma 2. No CUDA kernel has this: the
    /// formulas of `plain` compute it there, with all scores in memory.
    pub softcap: Option<f64>,
    /// Dropout of the weights after the softmax.
    pub dropout: Option<AttentionDropout>,
    /// On GPUs sums of gradients have one order. Without it the gradient of the queries in attention with a head_dim of
    /// 128 is accumulated in arbitrary order, which is faster; nothing else is without an order.
    pub deterministic: bool,
}

impl AttentionOptions {
    /// Causal attention with the usual scale `1/√head_dim`, no window, softcap or dropout.
    pub fn causal(head_dim: usize) -> Self {
        let scale = 1.0 / (head_dim as f64).sqrt();
        Self { scale, causal: true, window: None, softcap: None, dropout: None, deterministic: false }
    }

    /// The same, but every query sees every key, with this scale.
    pub fn full(scale: f64) -> Self {
        Self { scale, causal: false, ..Self::causal(1) }
    }

    /// The half-open range of `keys` keys that the query at position `i` may see, empty if it sees none. Both ends grow
    /// with `i`.
    pub(crate) fn visible(&self, i: i64, keys: usize) -> (usize, usize) {
        let reach = self.window.map_or(i64::MAX, |window| i64::try_from(window).unwrap_or(i64::MAX));
        let high = if self.causal { i + 1 } else { i.saturating_add(reach) };
        let high = high.clamp(0, keys as i64);
        ((i + 1).saturating_sub(reach).clamp(0, high) as usize, high as usize)
    }
}

/// The position of a call's scores in the scores of whole sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ScoreOffset {
    /// Position of the first query, counted from the call's first key; may lie before or after all keys.
    pub first_query: i64,
    /// Index of the first query and of the first key in the whole sequences, for the dropout mask.
    pub first: [usize; 2],
    /// Queries of the whole sequence, for dropout.
    pub queries: usize,
}

impl ScoreOffset {
    /// All scores of `queries` queries that have the last positions of `keys` keys.
    pub fn whole(queries: usize, keys: usize) -> Self {
        Self { first_query: keys as i64 - queries as i64, first: [0, 0], queries }
    }
}

/// Dropout of attention weights: after the softmax a weight becomes zero with probability `p`, else it is divided by `1
/// - p`. The mask is a function of the seed and the weight's position `[sample, head, query, key]` in the global
/// tensor. So ranks with other samples or heads draw the mask of a single rank, and a recomputed forward pass draws the
/// same mask. The rule is that of [`DropoutMask`](super::DropoutMask).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionDropout {
    /// Probability in `0..1`, rounded to f32.
    pub p: f64,
    /// Use another seed for every layer and step.
    pub seed: u64,
    /// Index of the call's first sample in the global batch.
    pub first_sample: usize,
    /// Index of the call's first query head in the layer.
    pub first_head: usize,
    /// Query heads of the layer.
    pub heads: usize,
}

impl AttentionDropout {
    /// Draws below this are dropped.
    pub(crate) fn limit(&self) -> u32 {
        threshold(f64::from(self.p as f32))
    }

    /// The factor of the weights that are not dropped.
    pub(crate) fn scale(&self) -> f64 {
        1.0 / (1.0 - f64::from(self.p as f32))
    }

    /// The key of the weights of `query`, one of `queries`, in the call's `sample` and `head`.
    pub(crate) fn row(&self, [sample, head]: [usize; 2], query: usize, queries: usize) -> RowKey {
        let head = (self.first_sample + sample) * self.heads + self.first_head + head;
        RowKey::new(self.seed, (head * queries + query) as u64)
    }
}

/// Numbers of query and key/value heads in a packed `[s, b, heads + 2 kv_heads, d]` tensor `[q | k | v]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedHeads {
    /// Query heads.
    pub heads: usize,
    /// Key heads, and as many value heads.
    pub kv_heads: usize,
}

impl PackedHeads {
    /// Size of the packed head dimension.
    pub fn total(&self) -> usize {
        self.heads + 2 * self.kv_heads
    }
}

/// Direction of a rotary embedding: the gradient of a rotation is the rotation back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rotation {
    /// By `+angle`, the forward pass.
    Forward,
    /// By `-angle`, the backward pass.
    Back,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visible_keys() {
        let causal = AttentionOptions { scale: 1.0, ..AttentionOptions::causal(1) };
        assert_eq!(causal.visible(0, 5), (0, 1));
        assert_eq!(causal.visible(4, 5), (0, 5));
        let window = AttentionOptions { window: Some(2), ..causal };
        assert_eq!(window.visible(0, 5), (0, 1));
        assert_eq!(window.visible(3, 5), (2, 4));
        let both_sides = AttentionOptions { causal: false, ..window };
        assert_eq!(both_sides.visible(0, 5), (0, 2));
        assert_eq!(both_sides.visible(3, 5), (2, 5));
        assert_eq!(AttentionOptions { window: None, ..both_sides }.visible(3, 5), (0, 5));
    }

    #[test]
    fn queries_outside_the_keys() {
        let causal = AttentionOptions { scale: 1.0, ..AttentionOptions::causal(1) };
        assert_eq!(causal.visible(-1, 5), (0, 0));
        assert_eq!(causal.visible(9, 5), (0, 5));
        let window = AttentionOptions { window: Some(3), ..causal };
        assert_eq!([window.visible(6, 5), window.visible(7, 5)], [(4, 5), (5, 5)]);
        let both_sides = AttentionOptions { causal: false, ..window };
        assert_eq!([both_sides.visible(-2, 5), both_sides.visible(-3, 5)], [(0, 1), (0, 0)]);
    }
}
