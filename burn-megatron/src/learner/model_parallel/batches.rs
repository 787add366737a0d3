//! Global batches as burn-train passes them around: which samples, not their tokens.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::data::dataset::DatasetError;
use burn::tensor::Device;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::batch::BatchSizes;
use crate::console::STEPS;
use crate::data::{SampleError, TokenDataset, TopK};
use crate::engine::TokenBatch;

/// The samples of one optimizer step, or of one validation batch, over all ranks. Nothing is read before a rank asks
/// for its own sequences.
#[derive(Clone)]
pub struct GlobalBatch {
    data: Arc<dyn TokenDataset>,
    first: usize,
    sequences: usize,
}

/// Which samples of its data set a batch has: what processes tell each other of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct BatchRange {
    first: usize,
    sequences: usize,
}

impl BatchRange {
    /// Its first sample.
    pub fn first(self) -> usize {
        self.first
    }

    /// The batch of these samples of `data`.
    pub fn of(self, data: &Arc<dyn TokenDataset>) -> GlobalBatch {
        GlobalBatch::new(data.clone(), self.first, self.sequences)
    }
}

impl GlobalBatch {
    /// Which samples it has.
    pub(super) fn range(&self) -> BatchRange {
        BatchRange { first: self.first, sequences: self.sequences }
    }

    /// `sequences` samples of `data` from `first` on.
    pub(super) fn new(data: Arc<dyn TokenDataset>, first: usize, sequences: usize) -> Self {
        Self { data, first, sequences }
    }

    /// Sequences of the batch over all ranks.
    pub fn sequences(&self) -> usize {
        self.sequences
    }

    /// Reads some sequences of the batch. Samples after the last one of the data set start again at the first.
    ///
    /// # Errors
    /// If the data set cannot read them.
    ///
    /// # Panics
    /// If the sequences are not in the batch or the data set is empty.
    pub fn read(&self, range: Range<usize>) -> Result<TokenBatch, SampleError> {
        assert!(range.end <= self.sequences, "sequences {range:?} of a batch of {}", self.sequences);
        let count = range.len();
        let seq = self.data.seq_length();
        let mut batch = TokenBatch { sequences: count, seq, ..TokenBatch::default() };
        let (mut mask, mut documents) = (Vec::new(), Vec::new());
        let (mut masked, mut divided) = (false, false);
        let (mut references, mut taught) = (Vec::new(), Vec::new());
        for index in range {
            let sample = self.data.try_sample((self.first + index) % self.data.len())?;
            batch.tokens.extend(sample.tokens);
            batch.labels.extend(sample.labels);
            masked |= sample.loss_mask.is_some();
            mask.extend(sample.loss_mask.unwrap_or_else(|| vec![true; seq]));
            divided |= sample.documents.is_some();
            documents.push(sample.documents.unwrap_or_else(|| vec![0]));
            references.extend(sample.references);
            taught.extend(sample.taught);
        }
        batch.mask = masked.then_some(mask);
        batch.documents = divided.then_some(documents);
        // All samples of a data set have some, or none has.
        batch.taught = TopK::concat(taught.into_iter());
        batch.references = (references.len() == count).then_some(references);
        Ok(batch)
    }
}

/// `samples 64 to 71`
impl fmt::Display for GlobalBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "samples {} to {}", self.first, self.first + self.sequences - 1)
    }
}

/// A burn-train loader over the batches of a data set: each pass yields the next `per_pass` of them.
#[derive(Clone)]
pub struct BatchStream {
    data: Arc<dyn TokenDataset>,
    sizes: BatchSizes,
    /// Batches of the whole run.
    batches: Range<usize>,
    per_pass: usize,
    /// Where the run is; `None` makes every pass start at the first batch.
    cursor: Option<Arc<Mutex<Cursor>>>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Cursor {
    /// The next batch.
    batch: usize,
    /// Its first sample.
    sample: usize,
}

impl BatchStream {
    /// `total` batches of these sizes; a pass, which burn-train calls an epoch, yields `per_pass` of them and the
    /// next pass continues after it.
    pub fn advancing(data: Arc<dyn TokenDataset>, sizes: impl Into<BatchSizes>, total: usize, per_pass: usize) -> Self {
        Self { data, sizes: sizes.into(), batches: 0..total, per_pass, cursor: Some(Arc::default()) }
    }

    /// Continues after `batch` batches have consumed `sample` samples, in all clones of the stream. The pass in which
    /// that happened is continued.
    pub(super) fn resume_at(&self, batch: usize, sample: usize) {
        if let Some(cursor) = &self.cursor {
            *cursor.lock() = Cursor { batch, sample };
        }
    }

    /// Where a run that was never stopped is before a batch.
    fn first(&self, batch: usize) -> Cursor {
        Cursor { batch, sample: self.sizes.samples(batch as u64) as usize }
    }

    /// The same `total` batches of `sequences` samples in every pass.
    pub fn repeating(data: Arc<dyn TokenDataset>, sequences: usize, total: usize) -> Self {
        Self { data, sizes: sequences.into(), batches: 0..total, per_pass: total, cursor: None }
    }
}

struct Pass<'a> {
    stream: &'a BatchStream,
    next: Cursor,
    end: usize,
    done: usize,
    total: usize,
}

impl Iterator for Pass<'_> {
    type Item = Result<GlobalBatch, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        (self.next.batch < self.end).then(|| {
            let first = self.next.sample;
            let sequences = self.stream.sizes.at(first as u64);
            self.next = Cursor { batch: self.next.batch + 1, sample: first + sequences };
            self.done += 1;
            if let Some(cursor) = &self.stream.cursor {
                *cursor.lock() = self.next;
            }
            Ok(GlobalBatch::new(self.stream.data.clone(), first, sequences))
        })
    }
}

impl DataLoaderIterator<GlobalBatch> for Pass<'_> {
    fn progress(&self) -> Progress {
        Progress::new(self.done, self.total, Some(STEPS.to_string()))
    }
}

impl DataLoader<GlobalBatch> for BatchStream {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<GlobalBatch> + 'a> {
        let next = self.cursor.as_ref().map_or_else(|| self.first(self.batches.start), |cursor| *cursor.lock());
        let done = (next.batch - self.batches.start) % self.per_pass.max(1);
        let end = (next.batch + self.per_pass - done).min(self.batches.end);
        Box::new(Pass { stream: self, next, end, done, total: done + end.saturating_sub(next.batch) })
    }

    fn num_items(&self) -> usize {
        self.per_pass
    }

    fn expected_num_items(&self) -> Option<usize> {
        Some(self.per_pass)
    }

    fn to_device(&self, _: &Device) -> Arc<dyn DataLoader<GlobalBatch>> {
        Arc::new(self.clone())
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<GlobalBatch>> {
        let batches = self.batches.start + start..(self.batches.start + end).min(self.batches.end);
        let cursor = self.cursor.as_ref().map(|_| Arc::new(Mutex::new(self.first(batches.start))));
        Arc::new(Self { per_pass: batches.len(), batches, cursor, ..self.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::TokensInMemory;

    fn data() -> Arc<dyn TokenDataset> {
        Arc::new(TokensInMemory::new((0..21).collect::<Vec<i64>>(), 4))
    }

    fn firsts(stream: &BatchStream) -> Vec<i64> {
        stream.iter().map(|batch| batch.unwrap().read(0..1).unwrap().tokens[0]).collect()
    }

    #[test]
    fn passes_continue_where_the_last_ended_and_wrap_around_the_data() {
        let stream = BatchStream::advancing(data(), 2, 5, 2);
        assert_eq!(firsts(&stream), [0, 8]);
        assert_eq!(firsts(&stream), [16, 4]);
        assert_eq!(firsts(&stream), [12], "the last pass is shorter");
        assert!(firsts(&stream).is_empty());
    }

    #[test]
    fn a_resumed_stream_ends_the_pass_it_was_in() {
        let resumed = |sequences, batch, sample| {
            let stream = BatchStream::advancing(data(), sequences, 5, 2);
            stream.clone().resume_at(batch, sample);
            stream
        };
        let stream = resumed(2, 1, 2);
        assert_eq!(stream.iter().progress().items_processed, 1);
        assert_eq!(firsts(&stream), [8]);
        assert_eq!(firsts(&stream), [16, 4]);
        assert_eq!(firsts(&resumed(2, 2, 4)), [16, 4], "at the end of a pass");
        assert_eq!(firsts(&resumed(1, 2, 4)), [16, 0], "samples count, not batches");
    }

    #[test]
    fn repeating_passes_are_equal() {
        let stream = BatchStream::repeating(data(), 2, 2);
        assert_eq!(firsts(&stream), [0, 8]);
        assert_eq!(firsts(&stream), [0, 8]);
    }

    #[test]
    fn a_slice_has_its_own_batches_once_or_in_every_pass() {
        let firsts = |stream: &BatchStream| {
            let slice = stream.slice(1, 3);
            let pass = || slice.iter().map(|batch| batch.unwrap().read(0..1).unwrap().tokens[0]).collect::<Vec<i64>>();
            [pass(), pass()]
        };
        assert_eq!(firsts(&BatchStream::advancing(data(), 1, 5, 5)), [vec![4, 8], vec![]]);
        assert_eq!(firsts(&BatchStream::repeating(data(), 1, 5)), [[4, 8], [4, 8]]);
    }

    #[test]
    fn a_rank_reads_its_own_sequences() {
        let batch = BatchStream::repeating(data(), 4, 1).iter().next().unwrap().unwrap();
        let part = batch.read(1..3).unwrap();
        assert_eq!((part.sequences, part.seq), (2, 4));
        assert_eq!(part.tokens, (4..12).collect::<Vec<i64>>());
        assert_eq!(part.labels, (5..13).collect::<Vec<i64>>());
        assert!(part.mask.is_none());
    }
}
