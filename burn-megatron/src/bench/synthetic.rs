//! Random tokens for measuring speed.

use super::DocumentLengths;
use super::random::{mix, uniform};
use crate::data::{Sample, TokenDataset};

/// Sequences of random tokens, the same in every run. Small ids are frequent and large ones rare, about as in a
/// text, so that the loss falls when the model learns.
#[derive(Clone, Copy, Debug)]
pub struct SyntheticTokens {
    vocabulary: usize,
    seq_length: usize,
    sequences: usize,
    documents: Option<DocumentLengths>,
}

impl SyntheticTokens {
    /// `sequences` sequences of `seq_length` tokens below `vocabulary`.
    pub fn new(vocabulary: usize, seq_length: usize, sequences: usize) -> Self {
        Self { vocabulary, seq_length, sequences, documents: None }
    }

    /// In documents of these lengths; the last document of a sequence is truncated at its end.
    pub fn with_documents(self, documents: Option<DocumentLengths>) -> Self {
        Self { documents, ..self }
    }

    /// The starts of documents in a sequence.
    fn starts(&self, sequence: usize, lengths: DocumentLengths) -> Vec<usize> {
        let random = |document: u64| mix(((sequence as u64) << 32) + document);
        let next = |(document, start): &(u64, usize)| Some((document + 1, start + lengths.length(random(*document))));
        let starts = std::iter::successors(Some((0, 0)), next).map(|(_, start)| start);
        starts.take_while(|start| *start < self.seq_length).collect()
    }

    fn token(&self, index: u64) -> i64 {
        (uniform(index).powi(4) * self.vocabulary as f64) as i64
    }
}

impl TokenDataset for SyntheticTokens {
    fn len(&self) -> usize {
        self.sequences
    }

    fn seq_length(&self) -> usize {
        self.seq_length
    }

    fn sample(&self, index: usize) -> Sample {
        let first = (index * self.seq_length) as u64;
        let sample = Sample::from_tokens((0..=self.seq_length as u64).map(|at| self.token(first + at)).collect());
        Sample { documents: self.documents.map(|lengths| self.starts(index, lengths)), ..sample }
    }
}
