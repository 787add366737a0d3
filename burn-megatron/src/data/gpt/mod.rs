//! Megatron's `GPTDataset`: documents are shuffled and laid end to end, cut into samples of `S + 1` tokens that overlap
//! by one, and the samples are shuffled.

mod cache;
mod indices;
mod plan;

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use super::error::DataError;
use super::indexed::IndexedDataset;
use super::sample::{Sample, TokenDataset};
use indices::GptIndices;
pub use plan::EpochPlan;

/// Stands for a missing token at the end of a partial validation sample.
const PAD: i64 = -1;

/// How a [`GptDataset`] is drawn from its documents.
#[derive(Clone, Debug, PartialEq)]
pub struct GptOptions {
    /// Tokens per sample, S.
    pub seq_length: usize,
    /// Samples wanted; documents are repeated for as many epochs as that takes. `None` is one epoch.
    pub num_samples: Option<usize>,
    /// Seed of document and sample order.
    pub seed: u32,
    /// Whether tokens that do not fill a last sample are left out. If not, the last sample is padded and the padding
    /// does not count in the loss.
    pub drop_last: bool,
    /// Id of the end-of-document token, if the prediction made at it (the first token of the next document) should
    /// not count in the loss.
    pub eod_mask_loss: Option<i64>,
    /// Folder that keeps the orders between runs.
    pub cache: Option<PathBuf>,
}

/// Samples of fixed length from a range of the sequences of an [`IndexedDataset`], in Megatron's exact order.
#[derive(Debug)]
pub struct GptDataset {
    tokens: Arc<IndexedDataset>,
    indices: GptIndices,
    plan: EpochPlan,
    seq_length: usize,
    eod_mask_loss: Option<i64>,
}

impl GptDataset {
    /// Builds the orders, or takes them from the cache.
    ///
    /// # Errors
    /// When `documents` holds no tokens though samples are wanted, when there are too many samples to index, or when
    /// the cache cannot be written.
    pub fn new(tokens: Arc<IndexedDataset>, documents: Range<usize>, options: &GptOptions) -> Result<Self, DataError> {
        let lengths: Vec<u32> = documents.clone().map(|i| tokens.sequence_length(i) as u32).collect();
        let tokens_per_epoch = lengths.iter().map(|&length| u64::from(length)).sum();
        let refuse = |what| DataError::Samples { path: tokens.bin_path().to_path_buf(), what };
        let plan = EpochPlan::new(tokens_per_epoch, options).map_err(refuse)?;
        if plan.epochs.saturating_mul(lengths.len() as u64) > u64::from(u32::MAX) {
            return Err(refuse(format!("{} epochs of {} sequences are too many to index", plan.epochs, lengths.len())));
        }
        let first = documents.start as u32;
        let build = || indices::build(first, &lengths, &plan, options);
        let indices = match &options.cache {
            None => build(),
            Some(folder) => {
                let key = cache::key(first, &lengths, options);
                cache::load_or_build(folder, &key, &plan, plan.epochs as usize * lengths.len(), build)?
            }
        };
        Ok(Self { tokens, indices, plan, seq_length: options.seq_length, eod_mask_loss: options.eod_mask_loss })
    }

    /// How the samples spread over epochs.
    pub fn plan(&self) -> &EpochPlan {
        &self.plan
    }

    /// The `S + 1` tokens of a sample, with -1 where a partial last sample has none.
    ///
    /// # Panics
    /// When `index` is not below [`len`](TokenDataset::len).
    pub fn row(&self, index: usize) -> Vec<i64> {
        let (from, to) = self.indices.span(index);
        let mut row = Vec::with_capacity(self.seq_length + 1);
        for place in from.document..=to.document {
            let sequence = self.indices.document(place);
            let start = if place == from.document { from.offset } else { 0 };
            let end = if place == to.document { to.offset + 1 } else { self.tokens.sequence_length(sequence) };
            self.tokens.read(sequence, start..end, &mut row);
        }
        row.resize(self.seq_length + 1, PAD);
        row
    }
}

impl TokenDataset for GptDataset {
    fn len(&self) -> usize {
        self.indices.samples()
    }

    fn seq_length(&self) -> usize {
        self.seq_length
    }

    fn sample(&self, index: usize) -> Sample {
        let row = self.row(index);
        let padded = row[self.seq_length] == PAD;
        let mut sample = Sample::from_row(row);
        if padded || self.eod_mask_loss.is_some() {
            let counted = |(&token, &label): (&i64, &i64)| label != PAD && Some(token) != self.eod_mask_loss;
            sample.loss_mask = Some(sample.tokens.iter().zip(&sample.labels).map(counted).collect());
            for id in sample.tokens.iter_mut().chain(&mut sample.labels).filter(|id| **id == PAD) {
                *id = 0;
            }
        }
        sample
    }
}
