//! Sequences of tokens on the host, and the device tensors of one micro-batch.

use super::EngineError;
use crate::data::TopK;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use std::ops::Range;

/// Sequences of equal length: inputs, what to predict at each, and which predictions count.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenBatch {
    /// Number of sequences.
    pub sequences: usize,
    /// Tokens per sequence.
    pub seq: usize,
    /// Inputs, `sequences × seq` ids, one sequence after the other.
    pub tokens: Vec<i64>,
    /// What to predict at each input, same shape.
    pub labels: Vec<i64>,
    /// Which predictions count in the loss, same shape; `None` when all do.
    pub mask: Option<Vec<bool>>,
    /// Where documents start in each sequence, ascending from 0; `None` where every sequence is one document.
    pub documents: Option<Vec<Vec<usize>>>,
    /// In preference tuning the log-probability of each document of each sequence under the reference model; documents
    /// are chosen and rejected answers in turn, with KTO also one to another prompt.
    pub references: Option<Vec<Vec<f64>>>,
    /// In distillation from a file, what the teacher says at each input.
    pub taught: Option<TopK>,
}

impl TokenBatch {
    /// Sequences of `seq + 1` consecutive tokens: inputs are all but the last, labels all but the first.
    ///
    /// # Panics
    /// If `ids` is not a whole number of sequences.
    pub fn from_sequences(ids: &[i64], seq: usize) -> Self {
        assert!(ids.len().is_multiple_of(seq + 1), "{} ids are not sequences of {} ids", ids.len(), seq + 1);
        let sequences = ids.len() / (seq + 1);
        let shifted =
            |offset| ids.chunks(seq + 1).flat_map(|sequence| sequence[offset..offset + seq].to_vec()).collect();
        Self { sequences, seq, tokens: shifted(0), labels: shifted(1), ..Self::default() }
    }

    /// Some of the sequences.
    pub fn slice(&self, sequences: Range<usize>) -> Self {
        let range = sequences.start * self.seq..sequences.end * self.seq;
        Self {
            sequences: sequences.len(),
            seq: self.seq,
            tokens: self.tokens[range.clone()].to_vec(),
            labels: self.labels[range.clone()].to_vec(),
            mask: self.mask.as_ref().map(|mask| mask[range.clone()].to_vec()),
            taught: self.taught.as_ref().map(|taught| taught.slice(range)),
            documents: self.documents.as_ref().map(|documents| documents[sequences.clone()].to_vec()),
            references: self.references.as_ref().map(|references| references[sequences].to_vec()),
        }
    }

    /// The ranges of the documents in [`TokenBatch::tokens`]. A sequence without documents is one.
    pub(super) fn document_ranges(&self) -> Vec<Range<usize>> {
        let whole = vec![vec![0]; self.sequences];
        let starts = self.documents.as_ref().unwrap_or(&whole).iter().enumerate();
        let of_sequence = |(sequence, starts): (usize, &Vec<usize>)| {
            let ends = starts[1..].iter().copied().chain([self.seq]);
            let places =
                starts.iter().zip(ends).map(|(start, end)| sequence * self.seq + start..sequence * self.seq + end);
            places.collect::<Vec<_>>()
        };
        starts.flat_map(of_sequence).collect()
    }

    /// One sequence packed from some of the [`TokenBatch::document_ranges`], padded to `seq` tokens with tokens of the
    /// last document that do not count.
    pub(super) fn packed(&self, places: &[Range<usize>], seq: usize) -> Self {
        let all = || places.iter().cloned().flatten();
        let ids = |ids: &[i64]| all().map(|place| ids[place]).chain(std::iter::repeat(0)).take(seq).collect();
        let counts = |place: usize| self.mask.as_ref().is_none_or(|mask| mask[place]);
        let mask: Vec<bool> = all().map(counts).chain(std::iter::repeat(false)).take(seq).collect();
        let mut end = 0;
        let starts = places.iter().map(|place| {
            end += place.len();
            end - place.len()
        });
        Self {
            sequences: 1,
            seq,
            tokens: ids(&self.tokens),
            labels: ids(&self.labels),
            mask: mask.contains(&false).then_some(mask),
            documents: (places.len() > 1).then(|| Vec::from([starts.collect()])),
            references: None,
            taught: None,
        }
    }

    /// These positions of every sequence, one range after the other. The caller keeps the documents.
    pub(super) fn at_positions(&self, places: &[Range<usize>]) -> Self {
        if places.len() == 1 && places[0] == (0..self.seq) {
            return Self { documents: None, references: None, ..self.clone() };
        }
        fn select<T: Copy>(all: &[T], seq: usize, places: &[Range<usize>]) -> Vec<T> {
            all.chunks(seq)
                .flat_map(|sequence| places.iter().flat_map(|place| sequence[place.clone()].iter().copied()))
                .collect()
        }
        Self {
            sequences: self.sequences,
            seq: places.iter().map(Range::len).sum(),
            tokens: select(&self.tokens, self.seq, places),
            labels: select(&self.labels, self.seq, places),
            mask: self.mask.as_ref().map(|mask| select(mask, self.seq, places)),
            documents: None,
            references: None,
            taught: self.taught.as_ref().and_then(|taught| {
                let sequences = 0..self.sequences;
                let parts = sequences.flat_map(|at| places.iter().map(move |place| (at * self.seq, place)));
                TopK::concat(parts.map(|(first, place)| taught.slice(first + place.start..first + place.end)))
            }),
        }
    }

    /// Whether all tokens, and all labels that count, are among the first `vocabulary`: an embedding or a loss of
    /// others would silently be that of none. The error names the first that is not.
    pub(super) fn check_tokens(&self, vocabulary: usize) -> Result<(), EngineError> {
        let known = 0..vocabulary as i64;
        let counts = |place: &usize| self.mask.as_ref().is_none_or(|mask| mask[*place]);
        let token = (0..self.tokens.len()).find(|place| !known.contains(&self.tokens[*place]));
        let label = (0..self.labels.len()).filter(counts).find(|place| !known.contains(&self.labels[*place]));
        let (what, ids, place) = match (token, label) {
            (Some(place), _) => ("token", &self.tokens, place),
            (None, Some(place)) => ("label", &self.labels, place),
            (None, None) => return Ok(()),
        };
        let (sequence, position) = (place / self.seq, place % self.seq);
        Err(EngineError::Token { what, id: ids[place], position, sequence, vocabulary })
    }

    /// Takes all sequences but the first `sequences` out of the loss.
    pub fn count_first(&mut self, sequences: usize) {
        if sequences < self.sequences {
            let mask = self.mask.get_or_insert_with(|| vec![true; self.tokens.len()]);
            mask[sequences * self.seq..].fill(false);
        }
    }

    /// Number of predictions that count.
    pub fn counted(&self) -> usize {
        self.mask.as_ref().map_or(self.tokens.len(), |mask| mask.iter().filter(|counts| **counts).count())
    }

    /// For each sequence the position after its last prediction that counts.
    pub(super) fn ends(&self) -> Vec<usize> {
        let end = |mask: &[bool]| mask.iter().rposition(|counts| *counts).map_or(0, |last| last + 1);
        self.mask
            .as_ref()
            .map_or_else(|| vec![self.seq; self.sequences], |mask| mask.chunks(self.seq).map(end).collect())
    }

    /// Inputs `[sequences, seq]` on a device.
    pub fn tokens_on(&self, device: &Device) -> Tensor<2, Int> {
        self.upload(&self.tokens, device)
    }

    /// Labels `[sequences, seq]` on a device.
    pub fn labels_on(&self, device: &Device) -> Tensor<2, Int> {
        self.upload(&self.labels, device)
    }

    fn upload(&self, ids: &[i64], device: &Device) -> Tensor<2, Int> {
        Tensor::from_data(TensorData::new(ids.to_vec(), [self.sequences, self.seq]), (device, DType::I64))
    }

    /// Sum, in double precision, of the losses that count. `losses` are sequence by sequence.
    pub fn masked_sum(&self, losses: impl Iterator<Item = f64>) -> f64 {
        match &self.mask {
            None => losses.sum(),
            Some(mask) => losses.zip(mask).filter(|(_, counts)| **counts).map(|(loss, _)| loss).sum(),
        }
    }

    /// The mask as factors `[sequences, seq]`, each `factor` or 0; with `by_token` multiplied with those.
    pub fn weights(&self, factor: f64, by_token: Option<&[f64]>, device: &Device, dtype: DType) -> Tensor<2> {
        let counts = |index: usize| self.mask.as_ref().is_none_or(|mask| mask[index]);
        let own = |index: usize| by_token.map_or(1.0, |factors| factors[index]);
        let weight = |index: usize| if counts(index) { factor * own(index) } else { 0.0 };
        let values: Vec<f64> = (0..self.tokens.len()).map(weight).collect();
        Tensor::from_data(TensorData::new(values, [self.sequences, self.seq]), (device, dtype))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_that_a_model_lacks_are_named_and_labels_only_where_they_count() {
        let mut batch = TokenBatch::from_sequences(&[1, 2, 3, 4, 5, 6], 2);
        assert_eq!(batch.check_tokens(7), Ok(()));
        let token = |what, id, sequence| Err(EngineError::Token { what, id, position: 1, sequence, vocabulary: 6 });
        assert_eq!(batch.check_tokens(6), token("label", 6, 1));
        batch.mask = Some(vec![true, true, true, false]);
        assert_eq!(batch.check_tokens(6), Ok(()));
        batch.tokens[1] = -1;
        assert_eq!(batch.check_tokens(6), token("token", -1, 0));
    }

    #[test]
    fn sequences_labels_and_masks_stay_together() {
        let mut batch = TokenBatch::from_sequences(&[1, 2, 3, 4, 5, 6], 2);
        assert_eq!(
            (batch.tokens.as_slice(), batch.labels.as_slice()),
            ([1, 2, 4, 5].as_slice(), [2, 3, 5, 6].as_slice())
        );
        assert_eq!(batch.counted(), 4);
        batch.mask = Some(vec![true, false, false, true]);
        batch.documents = Some(vec![vec![0], vec![0, 1]]);
        let last = batch.slice(1..2);
        assert_eq!(last.documents, Some(vec![vec![0, 1]]));
        let places = batch.document_ranges();
        assert_eq!(places, [0..2, 2..3, 3..4]);
        let packed = batch.packed(&[places[2].clone(), places[0].clone()], 4);
        assert_eq!((packed.tokens, packed.documents), (vec![5, 1, 2, 0], Some(vec![vec![0, 1]])));
        assert_eq!((packed.labels, packed.mask), (vec![6, 2, 3, 0], Some(vec![true, true, false, false])));
        let alone = batch.packed(&places[2..], 1);
        assert_eq!((alone.tokens.as_slice(), alone.mask, alone.documents), ([5].as_slice(), None, None));
        assert_eq!((last.tokens.as_slice(), last.mask.clone()), ([4, 5].as_slice(), Some(vec![false, true])));
        assert_eq!((batch.counted(), batch.masked_sum([1.0, 2.0, 4.0, 8.0].into_iter())), (2, 9.0));
        let weights = |batch: &TokenBatch, factor| batch.weights(factor, None, &Device::flex(), DType::F64).into_data();
        assert_eq!(weights(&batch, 0.5).iter::<f64>().collect::<Vec<_>>(), [0.5, 0.0, 0.0, 0.5]);
        let own = batch.weights(0.5, Some(&[2.0, 4.0, 6.0, 8.0]), &Device::flex(), DType::F64).into_data();
        assert_eq!(own.iter::<f64>().collect::<Vec<_>>(), [1.0, 0.0, 0.0, 4.0]);
        let second = batch.at_positions(&[1..2]);
        assert_eq!((second.tokens, second.labels, second.mask), (vec![2, 5], vec![3, 6], Some(vec![false, true])));
        let mut all = TokenBatch { mask: None, ..batch.clone() };
        assert_eq!(weights(&all, 1.0).iter::<f64>().sum::<f64>(), 4.0);
        all.count_first(2);
        assert_eq!(all.mask, None);
        all.count_first(1);
        assert_eq!(all.mask, Some(vec![true, true, false, false]));
        batch.count_first(1);
        assert_eq!(batch.mask, Some(vec![true, false, false, false]));
    }
}
