//! Batches of items by number. Every item has as many labels as the others, so that a loss is a mean over items, and padding of
//! its own.

use std::ops::Range;

use burn::tensor::{Device, Int, Tensor, TensorData};

use crate::learner::{BertBatch, T5Batch};
use models::hf::IGNORED;

/// `value` of each item and place, `[items, length]`.
fn ints(items: &Range<usize>, length: usize, device: &Device, value: impl Fn(usize, usize) -> i64) -> Tensor<2, Int> {
    let values: Vec<i64> = items
        .clone()
        .flat_map(|item| (0..length).map(move |at| (item, at)))
        .map(|(item, at)| value(item, at))
        .collect();
    Tensor::from_data(TensorData::new(values, [items.len(), length]), device)
}

fn token(vocab: usize, item: usize, at: usize) -> i64 {
    (1 + (item * 7 + at * at) % (vocab - 1)) as i64
}

pub(super) fn bert(items: Range<usize>, [seq, vocab]: [usize; 2], device: &Device) -> BertBatch {
    let half = seq / 2;
    let next: Vec<i64> = items.clone().map(|item| (item % 2) as i64).collect();
    let is_label = |item: usize, at: usize| at == item % half || at == half;
    BertBatch {
        tokens: ints(&items, seq, device, |item, at| token(vocab, item, at)),
        types: ints(&items, seq, device, |item, at| i64::from(at > item % half)),
        padding: ints(&items, seq, device, |item, at| i64::from(at + item % 3 >= seq)).equal_elem(1),
        labels: ints(
            &items,
            seq,
            device,
            |item, at| {
                if is_label(item, at) { token(vocab, item + 1, at) } else { IGNORED }
            },
        ),
        next_sentence: Tensor::from_data(next.as_slice(), device),
    }
}

pub(super) fn t5(items: Range<usize>, [seq, vocab]: [usize; 2], device: &Device) -> T5Batch {
    let out = seq / 2;
    T5Batch {
        input: ints(&items, seq, device, |item, at| token(vocab, item, at)),
        padding: ints(&items, seq, device, |item, at| i64::from(at + item % 3 >= seq)).equal_elem(1),
        output: ints(&items, out, device, |item, at| token(vocab, item + 3, at)),
        labels: ints(
            &items,
            out,
            device,
            |item, at| {
                if at == item % out { IGNORED } else { token(vocab, item + 5, at) }
            },
        ),
    }
}
