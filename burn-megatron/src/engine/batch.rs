//! Rows of tokens on the host, and the device tensors of one micro-batch.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use std::ops::Range;

/// Rows of equal length: inputs, what to predict at each, and which predictions count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenBatch {
    /// Number of rows.
    pub rows: usize,
    /// Tokens per row.
    pub seq: usize,
    /// Inputs, `rows × seq` ids, row by row.
    pub tokens: Vec<i64>,
    /// What to predict at each input, same shape.
    pub labels: Vec<i64>,
    /// Which predictions count in the loss, same shape; `None` when all do.
    pub mask: Option<Vec<bool>>,
    /// Where documents start in each row, ascending from 0; `None` where rows are one document each.
    pub documents: Option<Vec<Vec<usize>>>,
}

impl TokenBatch {
    /// Rows of `seq + 1` consecutive tokens: inputs are all but the last, labels all but the first.
    ///
    /// # Panics
    /// If `ids` is not a whole number of rows.
    pub fn from_sequences(ids: &[i64], seq: usize) -> Self {
        assert!(ids.len().is_multiple_of(seq + 1), "{} ids are not rows of {} ids", ids.len(), seq + 1);
        let rows = ids.len() / (seq + 1);
        let cut = |offset| ids.chunks(seq + 1).flat_map(|row| row[offset..offset + seq].to_vec()).collect();
        Self { rows, seq, tokens: cut(0), labels: cut(1), mask: None, documents: None }
    }

    /// Some of the rows.
    pub fn slice(&self, rows: Range<usize>) -> Self {
        let range = rows.start * self.seq..rows.end * self.seq;
        Self {
            rows: rows.len(),
            seq: self.seq,
            tokens: self.tokens[range.clone()].to_vec(),
            labels: self.labels[range.clone()].to_vec(),
            mask: self.mask.as_ref().map(|mask| mask[range].to_vec()),
            documents: self.documents.as_ref().map(|documents| documents[rows].to_vec()),
        }
    }

    /// Every document as a row of its own, filled up to `length` of its own length with tokens that do not count. Rows without
    /// documents are one each.
    pub(super) fn split(&self, length: impl Fn(usize, usize) -> usize) -> Vec<Self> {
        let whole = vec![vec![0]; self.rows];
        let starts = self.documents.as_ref().unwrap_or(&whole);
        let places = (starts.iter().enumerate()).flat_map(|(row, starts)| {
            let ends = starts[1..].iter().copied().chain([self.seq]);
            starts.iter().zip(ends).map(move |(start, end)| row * self.seq + start..row * self.seq + end)
        });
        let alone = |(index, range): (usize, Range<usize>)| {
            let seq = length(index, range.len());
            let ids = |all: &[i64]| all[range.clone()].iter().copied().chain(std::iter::repeat(0)).take(seq).collect();
            let counts = |place: usize| self.mask.as_ref().is_none_or(|mask| mask[place]);
            let mask = range.clone().map(counts).chain(std::iter::repeat(false)).take(seq).collect();
            Self {
                rows: 1,
                seq,
                tokens: ids(&self.tokens),
                labels: ids(&self.labels),
                mask: Some(mask),
                documents: None,
            }
        };
        places.enumerate().map(alone).collect()
    }

    /// Lengths of the documents, in the order of [`TokenBatch::split`].
    pub(super) fn document_lengths(&self) -> Vec<usize> {
        self.split(|_, length| length).iter().map(|document| document.seq).collect()
    }

    /// Of every row what lies at `places`, one after the other; whoever cuts rows keeps their documents.
    pub(super) fn at_places(&self, places: &[Range<usize>]) -> Self {
        if places.len() == 1 && places[0] == (0..self.seq) {
            return Self { documents: None, ..self.clone() };
        }
        fn cut<T: Copy>(all: &[T], seq: usize, places: &[Range<usize>]) -> Vec<T> {
            all.chunks(seq).flat_map(|row| places.iter().flat_map(|place| row[place.clone()].iter().copied())).collect()
        }
        Self {
            rows: self.rows,
            seq: places.iter().map(Range::len).sum(),
            tokens: cut(&self.tokens, self.seq, places),
            labels: cut(&self.labels, self.seq, places),
            mask: self.mask.as_ref().map(|mask| cut(mask, self.seq, places)),
            documents: None,
        }
    }

    /// Number of predictions that count.
    pub fn counted(&self) -> usize {
        self.mask.as_ref().map_or(self.tokens.len(), |mask| mask.iter().filter(|counts| **counts).count())
    }

    /// Inputs `[rows, seq]` on a device.
    pub fn tokens_on(&self, device: &Device) -> Tensor<2, Int> {
        self.upload(&self.tokens, device)
    }

    /// Labels `[rows, seq]` on a device.
    pub fn labels_on(&self, device: &Device) -> Tensor<2, Int> {
        self.upload(&self.labels, device)
    }

    fn upload(&self, ids: &[i64], device: &Device) -> Tensor<2, Int> {
        Tensor::from_data(TensorData::new(ids.to_vec(), [self.rows, self.seq]), (device, DType::I64))
    }

    /// Sum, in double precision, of the losses that count. `losses` are row by row.
    pub fn masked_sum(&self, losses: impl Iterator<Item = f64>) -> f64 {
        match &self.mask {
            None => losses.sum(),
            Some(mask) => losses.zip(mask).filter(|(_, counts)| **counts).map(|(loss, _)| loss).sum(),
        }
    }

    /// The mask as factors `[rows, seq]`, each `factor` or 0.
    pub fn weights(&self, factor: f64, device: &Device, dtype: DType) -> Tensor<2> {
        let weight = |index: usize| if self.mask.as_ref().is_none_or(|mask| mask[index]) { factor } else { 0.0 };
        let values: Vec<f64> = (0..self.tokens.len()).map(weight).collect();
        Tensor::from_data(TensorData::new(values, [self.rows, self.seq]), (device, dtype))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_labels_and_masks_stay_together() {
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
        assert_eq!(batch.document_lengths(), [2, 1, 1]);
        let split = batch.split(|_, length| length.next_multiple_of(2));
        assert_eq!((split[2].tokens.as_slice(), split[2].mask.clone()), ([5, 0].as_slice(), Some(vec![true, false])));
        assert_eq!((last.tokens.as_slice(), last.mask.clone()), ([4, 5].as_slice(), Some(vec![false, true])));
        assert_eq!((batch.counted(), batch.masked_sum([1.0, 2.0, 4.0, 8.0].into_iter())), (2, 9.0));
        let weights = |batch: &TokenBatch, factor| batch.weights(factor, &Device::flex(), DType::F64).into_data();
        assert_eq!(weights(&batch, 0.5).iter::<f64>().collect::<Vec<_>>(), [0.5, 0.0, 0.0, 0.5]);
        let second = batch.at_places(&[1..2]);
        assert_eq!((second.tokens, second.labels, second.mask), (vec![2, 5], vec![3, 6], Some(vec![false, true])));
        assert_eq!(weights(&TokenBatch { mask: None, ..batch }, 1.0).iter::<f64>().sum::<f64>(), 4.0);
    }
}
