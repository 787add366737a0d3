//! Plain values which say how an operation is to be done.

/// Which GELU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GeluKind {
    /// `x/2 (1 + erf(x/√2))`, exact to rounding.
    Erf,
    /// `x/2 (1 + tanh(√(2/π) (x + 0.044715 x³)))`, the approximation of GPT-2.
    Tanh,
}

/// Which keys a query sees, and the factor in front of the scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionOptions {
    /// Factor of `q·k`, usually `1/√head_dim`.
    pub scale: f64,
    /// Query `i` sees only keys `j <= i`.
    pub causal: bool,
    /// Sliding window: query `i` sees only keys with `|i - j| < window` (itself included), as in Mistral.
    pub window: Option<usize>,
}

impl AttentionOptions {
    /// Causal attention with the usual scale `1/√head_dim` and no window.
    pub fn causal(head_dim: usize) -> Self {
        Self { scale: 1.0 / (head_dim as f64).sqrt(), causal: true, window: None }
    }

    /// The half-open range of `keys` keys which the query at position `i` may see.
    pub(crate) fn visible(&self, i: usize, keys: usize) -> (usize, usize) {
        let reach = self.window.unwrap_or(usize::MAX);
        let low = (i + 1).saturating_sub(reach).min(keys);
        let high = if self.causal { i + 1 } else { i.saturating_add(reach) };
        (low, high.min(keys))
    }
}

/// How many query and key/value heads lie side by side in a packed `[s, b, heads + 2 kv_heads, d]` tensor `[q | k | v]`.
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
        let causal = AttentionOptions { scale: 1.0, causal: true, window: None };
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
}
