//! Masks for single scores, and random dropout of weights.

use burn::backend::{Backend, tensor::FloatTensor as Float};
#[cfg(feature = "cuda")]
use kernels_cubecl::attention::{BitMask, ScoreMasks};
use kernels_cubecl::fused::Draw;

/// Scores that attention leaves out, and weights that it drops. They are for one attention and its gradients.
pub struct AttentionMasks<B: Backend> {
    /// One where a query does not see a key, else zero; broadcasts to `[b, h, s, keys]`. The output of a query that sees
    /// none is zero.
    pub hidden: Option<Float<B>>,
    /// Dropout of weights after the softmax.
    pub kept: Option<Kept>,
    /// The masks as kernels read them.
    #[cfg(feature = "cuda")]
    pub(crate) bits: std::sync::OnceLock<Bits>,
}

/// The weight of index `i` in `[b, h, s, keys]` is multiplied by the random number `i` of `draw`, zero or one, and by
/// `factor`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Kept {
    /// Zeros and ones.
    pub draw: Draw,
    /// `1 / (1 - p)`.
    pub factor: f64,
}

impl<B: Backend> AttentionMasks<B> {
    /// Masks for one attention.
    pub fn new(hidden: Option<Float<B>>, kept: Option<Kept>) -> Self {
        Self {
            hidden,
            kept,
            #[cfg(feature = "cuda")]
            bits: std::sync::OnceLock::new(),
        }
    }

    /// Whether every score is visible and every weight kept.
    pub fn is_empty(&self) -> bool {
        self.hidden.is_none() && self.kept.is_none()
    }
}

/// The masks of one attention as bits.
#[cfg(feature = "cuda")]
#[derive(Clone, Debug, Default)]
pub(crate) struct Bits {
    pub hidden: Option<BitMask>,
    /// With the factor of what is kept.
    pub kept: Option<(BitMask, f32)>,
}

#[cfg(feature = "cuda")]
impl Bits {
    /// The masks of a call.
    pub fn masks(&self) -> ScoreMasks<'_> {
        let kept = self.kept.as_ref().map(|(kept, factor)| (kept, *factor));
        ScoreMasks { hidden: self.hidden.as_ref(), kept }
    }
}
