//! A rank's part of its micro-batches: the one place where sequences are cut over context parallel ranks.

use super::TokenBatch;
use backend_dist::ops::context::{ContextParallel, Documents};
use models::MicroBatch;
use serde::{Deserialize, Serialize};

/// What documents inside a sequence mean; without documents nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct DocumentConfig {
    /// Attention stays inside them (Megatron's `--reset-attention-mask`).
    pub reset_attention_mask: bool,
    /// Positions count from the start of each (`--reset-position-ids`).
    pub reset_position_ids: bool,
}

/// Documents are as if each was alone.
impl Default for DocumentConfig {
    fn default() -> Self {
        Self { reset_attention_mask: true, reset_position_ids: true }
    }
}

/// What this rank computes of a micro-batch.
pub(super) struct Share {
    /// Of every row the positions of this rank.
    pub tokens: TokenBatch,
    /// Predictions that count in the micro-batch, over all ranks that share its rows.
    pub counted: usize,
    /// What layers must know.
    pub of: MicroBatch,
}

impl Share {
    /// This rank's part of `batch`, whose rows the ranks of `context` share.
    pub fn new(batch: &TokenBatch, context: Option<ContextParallel>, how: DocumentConfig) -> Self {
        let documents = batch.documents.as_ref().map(|starts| Documents::new(starts.clone()));
        let of = MicroBatch {
            context,
            restarts: documents.clone().filter(|_| how.reset_position_ids),
            documents: documents.filter(|_| how.reset_attention_mask),
            ..MicroBatch::default()
        };
        let places = of.places(batch.seq / of.sequence_length(1));
        Self { tokens: batch.at_places(&places), counted: batch.counted(), of }
    }
}
