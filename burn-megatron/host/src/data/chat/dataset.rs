//! Conversations as sequences to train on.

use std::path::PathBuf;

use super::encode::ChatTokenizer;
use super::error::{ChatError, Result};
use super::learned::{ChatLoss, Fit, TooLong, learned};
use super::packed::Packed;
use super::preprocess::{Skipped, encode_all};
use crate::data::{Sample, SampleError, TokenDataset};

/// How files of conversations become sequences.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatSet {
    /// Files of rows, in order.
    pub files: Vec<PathBuf>,
    /// Which tokens are learned.
    pub loss: ChatLoss,
    /// Whether several samples share a sequence.
    pub packing: bool,
    /// What happens to samples that are longer than a sequence.
    pub too_long: TooLong,
    /// Whether rows that cannot be used are left out and counted.
    pub skip_bad_rows: bool,
}

/// What became of the rows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChatReport {
    /// Samples that are there.
    pub samples: usize,
    /// Rows that cannot be used.
    pub skipped: Skipped,
    /// Samples whose end was left out.
    pub truncated: usize,
    /// Samples that were left out because they are longer than a sequence, also where nothing to learn would remain.
    pub dropped: usize,
    /// Tokens that are learned.
    pub learned: usize,
}

impl ChatReport {
    /// Of files in which no `sample` can be used.
    pub(super) fn nothing(&self, sample: &str, files: &[PathBuf]) -> ChatError {
        let files: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
        let (files, bad, long, why) = (files.join(", "), self.skipped.rows, self.dropped, self.skipped.named());
        let what = format!("no {sample} of {files} can be used: {bad} rows are bad, {long} {sample}s too long{why}");
        ChatError::Nothing { what }
    }
}

/// Sequences of conversations. Those that share a sequence are documents of it.
pub type ChatDataset = Packed<()>;

impl ChatDataset {
    /// Reads, encodes and packs all rows into sequences of `seq_length` predictions, in the order of the packing.
    pub fn open(tokenizer: &ChatTokenizer, set: &ChatSet, seq_length: usize) -> Result<(Self, ChatReport)> {
        let (mut samples, mut report) = (Vec::new(), ChatReport::default());
        report.skipped = encode_all(tokenizer, &set.files, set.skip_bad_rows, |row, sample| {
            let tokens = sample.ids.len();
            match learned(sample, set.loss).fit(seq_length, set.too_long) {
                Fit::Whole(sample) => samples.push(vec![sample]),
                Fit::Truncated(sample) => {
                    report.truncated += 1;
                    samples.push(vec![sample]);
                }
                Fit::Dropped => report.dropped += 1,
                Fit::Nothing => return Err(row.refused("the sample has no token to predict".into())),
                Fit::Refused => {
                    return Err(row.refused(format!(
                        "the sample has {tokens} tokens, which predict {}, but training.seq-length = {seq_length}; nearest legal: \
                         training.seq-length = {}, or chat.too-long = truncate or drop",
                        tokens - 1,
                        tokens - 1
                    )));
                }
            }
            Ok(())
        })?;
        if samples.is_empty() {
            return Err(report.nothing("sample", &set.files));
        }
        let data = Self::new(samples, seq_length, set.packing);
        (report.samples, report.learned) = (data.groups.len(), data.learned());
        Ok((data, report))
    }
}

impl TokenDataset for ChatDataset {
    fn len(&self) -> usize {
        self.order.len()
    }

    fn seq_length(&self) -> usize {
        self.seq_length
    }

    fn sample(&self, index: usize) -> Sample {
        self.texts(index)
    }

    fn content(&self) -> Result<Option<String>, SampleError> {
        Ok(Some(self.content.clone()))
    }
}

#[cfg(test)]
impl ChatDataset {
    /// Packed samples.
    pub(super) fn of(samples: Vec<super::learned::Tokens>, seq_length: usize) -> Self {
        Self::new(samples.into_iter().map(|sample| vec![sample]).collect(), seq_length, true)
    }
}

#[cfg(test)]
mod tests {
    use super::super::learned::Tokens;
    use super::super::learned::tests::sample;
    use super::*;

    #[test]
    fn sequences_have_documents_labels_and_masks_of_their_samples() {
        let samples = vec![sample(10..13, &[1..3]), sample(20..25, &[1..2, 3..5])];
        let samples: Vec<Tokens> = samples.into_iter().map(|sample| learned(sample, ChatLoss::Assistant)).collect();
        let sample = ChatDataset::of(samples, 8).sample(0);
        assert_eq!(sample.tokens, [20, 21, 22, 23, 10, 11, 0, 0]);
        assert_eq!(sample.labels, [21, 22, 23, 24, 11, 12, 0, 0]);
        assert_eq!(sample.loss_mask.unwrap(), [true, false, true, true, true, true, false, false]);
        assert_eq!(sample.documents.unwrap(), [0, 4]);
    }

    #[test]
    fn epochs_have_orders_of_their_own_and_validation_is_held_out() {
        let samples = (0..8).map(|i| learned(sample(i..i + 4, &[1..4]), ChatLoss::All)).collect();
        let data = ChatDataset::of(samples, 3);
        let firsts = |data: &ChatDataset| -> Vec<i64> { (0..data.len()).map(|i| data.sample(i).tokens[0]).collect() };
        let two = firsts(&data.clone().shuffled(16, 1));
        let (mut first, mut second) = (two[..8].to_vec(), two[8..].to_vec());
        assert_ne!(first, second);
        first.sort_unstable();
        second.sort_unstable();
        assert_eq!((first, second), ((0..8).collect(), (0..8).collect()));
        assert_eq!(two, firsts(&data.clone().shuffled(16, 1)));
        let [train, valid] = data.split(0.25, 3, "chat").unwrap();
        let mut all = [firsts(&train), firsts(&valid)].concat();
        all.sort_unstable();
        assert_eq!((train.len(), valid.len(), all), (6, 2, (0..8).collect()));
    }
}
