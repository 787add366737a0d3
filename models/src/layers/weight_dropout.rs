//! Dropout of attention weights.

use backend_dist::ops::AttentionDropout;

use crate::micro_batch::DropoutKey;

/// What tells the rank's attention weights from all others when some are dropped.
#[derive(Clone, Copy, Debug)]
pub(super) struct WeightDropout {
    pub share: f64,
    pub stream: u64,
    pub first_head: usize,
    pub heads: usize,
}

impl WeightDropout {
    /// The dropout of a pass, if it drops anything.
    pub fn with(&self, key: Option<&DropoutKey>) -> Option<AttentionDropout> {
        let Self { share: p, stream, first_head, heads } = *self;
        let key = key.filter(|_| p > 0.0)?;
        Some(AttentionDropout { p, seed: key.seed ^ stream, first_sample: key.first_sample, first_head, heads })
    }
}
