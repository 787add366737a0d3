//! What an engine asks of a dataset.

use std::error::Error;
use std::sync::Arc;

use super::top_k::TopK;

/// One training sample of S tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Inputs, S token ids.
    pub tokens: Vec<i64>,
    /// What to predict at each input, S token ids: the inputs moved by one.
    pub labels: Vec<i64>,
    /// Which predictions count in the loss; `None` when all S do.
    pub loss_mask: Option<Vec<bool>>,
    /// Where documents start, ascending from 0, if they are told apart; `None` where the sample is one text.
    pub documents: Option<Vec<usize>>,
    /// In preference tuning the log-probability of each document under the reference model, 0 as long as it is not known.
    pub references: Option<Vec<f64>>,
    /// In distillation from a file, what the teacher says at each input.
    pub taught: Option<TopK>,
}

impl Sample {
    /// A sample from S + 1 consecutive tokens, all of which count.
    ///
    /// # Panics
    /// When `tokens` is empty.
    pub fn from_tokens(mut tokens: Vec<i64>) -> Self {
        let labels = tokens[1..].to_vec();
        tokens.pop();
        Self { tokens, labels, loss_mask: None, documents: None, references: None, taught: None }
    }

    /// Number of predictions that count in the loss.
    pub fn counted(&self) -> usize {
        self.loss_mask.as_ref().map_or(self.tokens.len(), |mask| mask.iter().filter(|counts| **counts).count())
    }
}

/// Why a sample cannot be read: whatever the dataset has to say.
pub type SampleError = Box<dyn Error + Send + Sync>;

/// A fixed order of samples of equal length. Access is random and takes the same time everywhere, so a resumed run
/// continues at its index.
pub trait TokenDataset: Send + Sync {
    /// Number of samples.
    fn len(&self) -> usize;

    /// Tokens per sample, S.
    fn seq_length(&self) -> usize;

    /// The sample at an index.
    ///
    /// # Panics
    /// When `index` is not below [`len`](Self::len), or [`try_sample`](Self::try_sample) has an error.
    fn sample(&self, index: usize) -> Sample;

    /// The sample at an index, as training asks for it: the rank that gets an error ends the run with its message. A
    /// dataset that reads files has this of its own.
    ///
    /// # Errors
    /// When a file can no longer be read.
    ///
    /// # Panics
    /// When `index` is not below [`len`](Self::len).
    fn try_sample(&self, index: usize) -> Result<Sample, SampleError> {
        Ok(self.sample(index))
    }

    /// The sample at an index without what a teacher's file says of it, which may know the sequences of a run only.
    ///
    /// # Errors
    /// As [`try_sample`](Self::try_sample).
    ///
    /// # Panics
    /// When `index` is not below [`len`](Self::len).
    fn untaught(&self, index: usize) -> Result<Sample, SampleError> {
        self.try_sample(index)
    }

    /// A hash that differs where the tokens do, from which a run that resumes knows its data again; `None` where none
    /// is known.
    fn content(&self) -> Result<Option<String>, SampleError> {
        Ok(None)
    }

    /// Of a data set for preference tuning, every sequence of its samples once, in order of their first use.
    fn distinct(&self) -> Option<Arc<dyn TokenDataset>> {
        None
    }

    /// Takes the log-probabilities under the reference model of the documents of every [`distinct`](Self::distinct)
    /// sequence; those that are there already stay.
    fn set_references(&self, _references: Vec<Vec<f64>>) {}

    /// Whether there is no sample.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
