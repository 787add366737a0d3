//! What all masked datasets are: which sentences each sample has.

use std::ops::Range;
use std::sync::Arc;

use super::mapping::{Mapping, SampleSentences};
use super::{MaskVocabulary, Result};
use crate::data::indexed::IndexedDataset;

/// How the samples of a kind of dataset are made.
pub trait SampleOptions {
    /// Refuses what no samples can be made with.
    ///
    /// # Errors
    /// Names the option that is out of range, and a legal value.
    fn check(&self) -> Result<()>;

    /// How documents become samples.
    fn mapping(&self) -> Mapping;
}

/// Samples of documents whose sentences are the sequences of an [`IndexedDataset`], in Megatron's exact order. A sample
/// is a function of the seed and its index.
#[derive(Clone, Debug)]
pub struct MaskedDataset<O> {
    pub(super) sentences: Arc<IndexedDataset>,
    pub(super) vocabulary: MaskVocabulary,
    pub(super) options: O,
    pub(super) samples: Vec<SampleSentences>,
}

impl<O: SampleOptions> MaskedDataset<O> {
    /// Maps documents to samples.
    ///
    /// # Errors
    /// If an option is out of range, a document is none of the file's, or none makes a sample.
    pub fn new(
        sentences: Arc<IndexedDataset>,
        documents: Range<usize>,
        vocabulary: MaskVocabulary,
        options: O,
    ) -> Result<Self> {
        options.check()?;
        vocabulary.check()?;
        let samples = options.mapping().of(&sentences, documents)?;
        Ok(Self { sentences, vocabulary, options, samples })
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        self.samples.len()
    }

    /// Never: a dataset without samples is refused.
    pub fn is_empty(&self) -> bool {
        self.samples.is_empty()
    }

    /// The sentences of each sample.
    pub fn mapping(&self) -> &[SampleSentences] {
        &self.samples
    }
}
