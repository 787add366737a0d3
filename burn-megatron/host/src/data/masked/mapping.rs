//! Which sentences a sample has: `build_mapping` of Megatron's `megatron/core/datasets/helpers.cpp`.

use std::ops::Range;

use super::mersenne64::Mersenne64;
use super::{MaskedError, Result};
use crate::data::indexed::IndexedDataset;
use crate::data::numpy::RandomState;

/// Tokens of a sentence above which its document is left out.
const LONG_SENTENCE: u32 = 512;

/// The sentences of one sample.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SampleSentences {
    /// Sequences of the file.
    pub sentences: Range<usize>,
    /// Tokens that the sample is truncated to.
    pub target: usize,
}

/// How documents are divided into samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mapping {
    /// Samples wanted: documents are repeated until there are as many. `None` is one epoch.
    pub num_samples: Option<usize>,
    /// Tokens of a sample without special ones; at least 2.
    pub max_length: usize,
    /// Share of samples that are truncated to a random shorter length.
    pub short_sequence_probability: f64,
    /// At least 1.
    pub seed: u32,
    /// Sentences that a sample needs.
    pub min_sentences: usize,
}

impl Mapping {
    /// The samples of some documents of a file. Fails if a document is none of the file's, or none makes a sample.
    pub(super) fn of(&self, sentences: &IndexedDataset, documents: Range<usize>) -> Result<Vec<SampleSentences>> {
        let (path, most) = (sentences.bin_path().display().to_string(), sentences.num_documents());
        if documents.end > most {
            return Err(MaskedError::Documents { path, documents, most });
        }
        let ranges: Vec<Range<usize>> = documents.map(|document| sentences.document(document)).collect();
        let samples = self.samples(&ranges, sentences.lengths());
        if samples.is_empty() {
            return Err(MaskedError::Empty { path, documents: ranges.len(), sentences: self.min_sentences });
        }
        Ok(samples)
    }

    /// The samples of documents, which are ranges of sentences with these numbers of tokens, shuffled. Whole epochs are
    /// mapped, so that there may be more samples than were asked for.
    pub fn samples(&self, documents: &[Range<usize>], lengths: &[u32]) -> Vec<SampleSentences> {
        let mut random = RandomState::new(self.seed);
        let wanted = self.num_samples.unwrap_or(1);
        let mut samples = Vec::new();
        while samples.len() < wanted {
            let before = samples.len();
            for document in documents {
                self.document(document.clone(), lengths, &mut random, &mut samples);
            }
            if self.num_samples.is_none() || samples.len() == before {
                break;
            }
        }
        let mut random = Mersenne64::new(u64::from(self.seed) + 1);
        for last in (1..samples.len()).rev() {
            samples.swap(last, (random.next_u64() % (last as u64 + 1)) as usize);
        }
        samples
    }

    fn document(
        &self,
        document: Range<usize>,
        lengths: &[u32],
        random: &mut RandomState,
        samples: &mut Vec<SampleSentences>,
    ) {
        let is_long = document.len() > 1 && lengths[document.clone()].iter().any(|length| *length > LONG_SENTENCE);
        if document.len() < self.min_sentences || is_long || document.is_empty() {
            // Megatron draws a length for a document of no sentences if a sample may have none; ours needs one.
            return;
        }
        let (mut start, mut tokens, mut target) = (document.start, 0, self.target(random));
        for sentence in document.clone() {
            tokens += lengths[sentence] as usize;
            let (count, left) = (sentence + 1 - start, document.end - sentence - 1);
            if (tokens >= target && left > 1 && count >= self.min_sentences) || left == 0 {
                samples.push(SampleSentences { sentences: start..sentence + 1, target });
                (start, tokens, target) = (sentence + 1, 0, self.target(random));
            }
        }
    }

    /// The length of the next sample.
    fn target(&self, random: &mut RandomState) -> usize {
        if self.short_sequence_probability == 0.0 {
            return self.max_length;
        }
        let ratio = (1.0 / self.short_sequence_probability).round() as u32;
        match random.next_u32() {
            drawn if drawn.is_multiple_of(ratio) => 2 + drawn as usize % (self.max_length - 1),
            _ => self.max_length,
        }
    }
}
