//! Batches of items by number. Every item has as many labels as the others, so that a loss is a mean over items, and padding of
//! its own.

use std::ops::Range;

use burn::tensor::{Device, Int, Tensor, TensorData};

use crate::learner::{BertBatch, LlavaBatch, T5Batch, VitBatch};
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

/// `[items, channels, size, size]`, different for every item.
fn pixels(items: &Range<usize>, [channels, size]: [usize; 2], device: &Device) -> Tensor<4> {
    let value = |item: usize, at: usize| ((item * 31 + at * (item % 5 + 1)) as f64 * 0.37).sin();
    let values: Vec<f64> = items
        .clone()
        .flat_map(|item| (0..channels * size * size).map(move |at| (item, at)))
        .map(|(item, at)| value(item, at))
        .collect();
    Tensor::from_data(TensorData::new(values, [items.len(), channels, size, size]), device)
}

pub(super) fn vit(items: Range<usize>, image: [usize; 2], classes: usize, device: &Device) -> VitBatch {
    let labels: Vec<i64> = items.clone().map(|item| (item % classes) as i64).collect();
    VitBatch { pixels: pixels(&items, image, device), classes: Tensor::from_data(labels.as_slice(), device) }
}

/// An image after the first tokens of every item, of which an image has `tokens` of the id `image_token`.
pub(super) fn llava(
    items: Range<usize>,
    image: [usize; 2],
    [seq, tokens, image_token]: [usize; 3],
    device: &Device,
) -> LlavaBatch {
    let is_image = |item: usize, at: usize| {
        let first = 1 + item % (seq - tokens);
        (first..first + tokens).contains(&at)
    };
    let id = |item, at| token(image_token, item, at);
    LlavaBatch {
        tokens: ints(
            &items,
            seq,
            device,
            |item, at| {
                if is_image(item, at) { image_token as i64 } else { id(item, at) }
            },
        ),
        labels: ints(&items, seq, device, |item, at| if is_image(item, at) { IGNORED } else { id(item, at) }),
        pixels: pixels(&items, image, device),
    }
}
