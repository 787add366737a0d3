//! Megatron's `GPTDataset`: documents are shuffled and concatenated, their tokens are split into samples of `S + 1`
//! that overlap by one, and the samples are shuffled.

mod cache;
mod indices;
mod plan;

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use super::error::DataError;
use super::indexed::{IndexedDataset, IndexedError};
use super::order;
use super::sample::{Sample, SampleError, TokenDataset};
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
    /// Id of the end-of-document token, if samples should say where their documents start: after each of these.
    pub eod_documents: Option<i64>,
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
    eod_documents: Option<i64>,
}

impl GptDataset {
    /// Builds the orders, or takes them from the cache.
    ///
    /// # Errors
    /// When `documents` holds no tokens though samples are wanted, when there are too many samples to index, or when
    /// the cache cannot be written.
    pub fn new(tokens: Arc<IndexedDataset>, documents: Range<usize>, options: &GptOptions) -> Result<Self, DataError> {
        let refuse = |what| DataError::Samples { path: tokens.bin_path().to_path_buf(), what };
        if documents.end > u32::MAX as usize {
            return Err(refuse(format!("{} sequences are too many to index", documents.end)));
        }
        let lengths = &tokens.lengths()[documents.clone()];
        let tokens_per_epoch = lengths.iter().map(|&length| u64::from(length)).sum();
        let plan = EpochPlan::new(tokens_per_epoch, options).map_err(refuse)?;
        if plan.epochs.saturating_mul(lengths.len() as u64) > u64::from(u32::MAX) {
            return Err(refuse(format!("{} epochs of {} sequences are too many to index", plan.epochs, lengths.len())));
        }
        let (first, positions) = (documents.start as u32, plan.epochs as usize * lengths.len());
        let bytes = 4 * indices::word_count(positions, plan.samples) as u64;
        let too_large = |available| order::too_large(tokens.bin_path(), plan.samples, bytes, available);
        order::check(bytes).map_err(too_large)?;
        // Under a limit of this process the system refuses although there is memory.
        let words = indices::reserve(positions, plan.samples).map_err(|_| too_large(bytes / 2))?;
        let build = |words| indices::build(words, first, lengths, &plan, options);
        let indices = match &options.cache {
            None => build(words),
            Some(folder) => {
                let key = cache::key(first, lengths, options);
                cache::load_or_build(folder, &key, &plan, positions, words, build)?
            }
        };
        let GptOptions { seq_length, eod_mask_loss, eod_documents, .. } = *options;
        Ok(Self { tokens, indices, plan, seq_length, eod_mask_loss, eod_documents })
    }

    /// How the samples spread over epochs.
    pub fn plan(&self) -> &EpochPlan {
        &self.plan
    }

    /// The `S + 1` tokens of a sample, with -1 where a partial last sample has none.
    ///
    /// # Errors
    /// When the `.bin` file can no longer be read.
    ///
    /// # Panics
    /// When `index` is not below [`len`](TokenDataset::len).
    pub fn tokens(&self, index: usize) -> Result<Vec<i64>, IndexedError> {
        let (from, to) = self.indices.span(index);
        let mut tokens = Vec::with_capacity(self.seq_length + 1);
        for position in from.document..=to.document {
            let sequence = self.indices.document(position);
            let start = if position == from.document { from.offset } else { 0 };
            let end = if position == to.document { to.offset + 1 } else { self.tokens.sequence_length(sequence) };
            self.tokens.read(sequence, start..end, &mut tokens)?;
        }
        tokens.resize(self.seq_length + 1, PAD);
        Ok(tokens)
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
        self.try_sample(index).unwrap_or_else(|error| panic!("{error}"))
    }

    fn try_sample(&self, index: usize) -> Result<Sample, SampleError> {
        let tokens = self.tokens(index)?;
        let padded = tokens[self.seq_length] == PAD;
        let mut sample = Sample::from_tokens(tokens);
        sample.documents = self.eod_documents.map(|eod| starts(&sample.tokens, eod));
        if padded || self.eod_mask_loss.is_some() {
            let counted = |(&token, &label): (&i64, &i64)| label != PAD && Some(token) != self.eod_mask_loss;
            sample.loss_mask = Some(sample.tokens.iter().zip(&sample.labels).map(counted).collect());
            for id in sample.tokens.iter_mut().chain(&mut sample.labels).filter(|id| **id == PAD) {
                *id = 0;
            }
        }
        Ok(sample)
    }

    fn content(&self) -> Result<Option<String>, SampleError> {
        Ok(Some(self.tokens.content()?))
    }
}

/// Where documents start in a sample: at its first token and after each end-of-document token
/// (`megatron/core/datasets/gpt_dataset.py`, `_get_ltor_masks_and_position_ids`).
fn starts(tokens: &[i64], eod: i64) -> Vec<usize> {
    let after_ends = (1..tokens.len()).filter(|position| tokens[position - 1] == eod);
    std::iter::once(0).chain(after_ends).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::indexed::{Dtype, IndexedWriter};

    /// One document of the ids 1 to 10, the tenth being the end-of-document token.
    fn ten(drop_last: bool, eod_mask_loss: Option<i64>) -> GptDataset {
        let folder = tempfile::tempdir().unwrap();
        let prefix = folder.path().join("ten");
        let mut writer = IndexedWriter::create(&prefix, Dtype::U8).unwrap();
        writer.push_sequence(&Vec::from_iter(1..=10i64)).unwrap();
        writer.finish().unwrap();
        let tokens = Arc::new(IndexedDataset::open(&prefix).unwrap());
        let options = GptOptions {
            seq_length: 4,
            num_samples: None,
            seed: 1,
            drop_last,
            eod_mask_loss,
            eod_documents: eod_mask_loss,
            cache: None,
        };
        GptDataset::new(tokens, 0..1, &options).unwrap()
    }

    fn sample_starting_with(data: &GptDataset, token: i64) -> Sample {
        (0..data.len()).map(|i| data.sample(i)).find(|sample| sample.tokens[0] == token).unwrap()
    }

    #[test]
    fn a_partial_last_sample_is_padded_and_masked() {
        assert_eq!(ten(true, None).len(), 2);
        let data = ten(false, None);
        assert_eq!(data.len(), 3);
        let full = sample_starting_with(&data, 5);
        assert_eq!(full, Sample::from_tokens(vec![5, 6, 7, 8, 9]));
        let partial = sample_starting_with(&data, 9);
        assert_eq!((partial.tokens.clone(), partial.labels.clone()), (vec![9, 10, 0, 0], vec![10, 0, 0, 0]));
        assert_eq!(partial.loss_mask, Some(vec![true, false, false, false]));
        assert_eq!(partial.counted(), 1);
    }

    #[test]
    fn what_is_predicted_at_an_end_of_document_can_be_left_out() {
        let data = ten(true, Some(6));
        assert_eq!(sample_starting_with(&data, 5).loss_mask, Some(vec![true, false, true, true]));
        assert_eq!(sample_starting_with(&data, 1).loss_mask, Some(vec![true; 4]));
        assert_eq!(sample_starting_with(&data, 5).documents, Some(vec![0, 2]));
        assert_eq!(sample_starting_with(&data, 1).documents, Some(vec![0]));
        assert_eq!(starts(&[6, 6, 1, 6], 6), [0, 1, 2], "an end of document at the last position begins nothing");
    }
}
