//! A rank's share of its micro-batches: the one place where sequences are sharded over context parallel ranks.

use super::TokenBatch;
use super::answers::Answers;
use super::rollouts::Completions;
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
pub(super) struct LocalBatch {
    /// The positions of this rank, of every sequence.
    pub tokens: TokenBatch,
    /// Predictions that count in the micro-batch, over all ranks that share its sequences.
    pub counted: usize,
    /// In preference tuning, whose tokens are whose.
    pub answers: Option<Answers>,
    /// In GRPO, how they have come about.
    pub completions: Option<Completions>,
    /// What layers must know.
    pub micro_batch: MicroBatch,
}

impl LocalBatch {
    /// This rank's share of `batch`, whose sequences the ranks of `context` share.
    pub fn new(batch: &TokenBatch, context: Option<ContextParallel>, documents: DocumentConfig) -> Self {
        let starts = batch.documents.as_ref().map(|starts| Documents::new(starts.clone()));
        let micro_batch = MicroBatch {
            context,
            restarts: starts.clone().filter(|_| documents.reset_position_ids),
            documents: starts.filter(|_| documents.reset_attention_mask),
            ..MicroBatch::default()
        };
        let positions = micro_batch.positions(batch.seq / micro_batch.sequence_length(1));
        let answers = Answers::of(batch, &positions);
        let tokens = batch.at_positions(&positions);
        Self { tokens, counted: batch.counted(), answers, completions: None, micro_batch }
    }
}
