//! Document, sample and shuffle index, in one array so that a cache file is one read.

use std::collections::TryReserveError;

use super::super::numpy::RandomState;
use super::{EpochPlan, GptOptions};

/// Where a sample starts: a position in the document order, and a token of that document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Start {
    pub document: usize,
    pub offset: usize,
}

/// The three orders of a dataset: `u32[D]` document index, `u32[n + 1][2]` sample index, `u32[n]` shuffle index.
#[derive(Debug)]
pub(super) struct GptIndices {
    words: Vec<u32>,
    documents: usize,
    samples: usize,
}

impl GptIndices {
    pub fn new(words: Vec<u32>, documents: usize, samples: usize) -> Self {
        assert_eq!(words.len(), word_count(documents, samples), "length of the sample order");
        Self { words, documents, samples }
    }

    pub fn words(&self) -> &[u32] {
        &self.words
    }

    pub fn samples(&self) -> usize {
        self.samples
    }

    /// The sequence at a position of the document order.
    pub fn document(&self, position: usize) -> usize {
        self.words[..self.documents][position] as usize
    }

    /// Where a sample starts and where its last token is.
    pub fn span(&self, index: usize) -> (Start, Start) {
        assert!(index < self.samples, "sample {index} of {}", self.samples);
        let (starts, shuffle) = self.words[self.documents..].split_at(2 * (self.samples + 1));
        let at = |i: usize| Start { document: starts[2 * i] as usize, offset: starts[2 * i + 1] as usize };
        let sample = shuffle[index] as usize;
        (at(sample), at(sample + 1))
    }
}

/// Length of the array for so many positions in the document order and samples.
pub(super) fn word_count(documents: usize, samples: usize) -> usize {
    documents + 2 * (samples + 1) + samples
}

/// An empty array with room for the orders; an error where the system has no memory for it.
pub(super) fn reserve(documents: usize, samples: usize) -> Result<Vec<u32>, TryReserveError> {
    let mut words = Vec::new();
    words.try_reserve_exact(word_count(documents, samples))?;
    Ok(words)
}

/// Builds the orders for the sequences `first ..` with these lengths, drawing from the seed in Megatron's order: first
/// epochs, last epoch, first samples, last samples. `words` is empty and has room for them.
pub(super) fn build(
    mut words: Vec<u32>,
    first: u32,
    lengths: &[u32],
    plan: &EpochPlan,
    options: &GptOptions,
) -> GptIndices {
    let mut random = RandomState::new(options.seed);
    let documents = plan.epochs as usize * lengths.len();

    let last_epoch = if plan.shuffled_apart.is_some() { 1 } else { 0 };
    for epochs in [plan.epochs - last_epoch.min(plan.epochs), last_epoch] {
        let start = words.len();
        for _ in 0..epochs {
            words.extend(first..first + lengths.len() as u32);
        }
        random.shuffle(&mut words[start..]);
    }

    push_starts(
        &mut words,
        documents,
        |sequence| lengths[(sequence - first) as usize],
        plan.samples,
        options.seq_length,
    );

    let start = words.len();
    words.extend(0..plan.samples as u32);
    let (before, last) = words[start..].split_at_mut(plan.shuffled_apart.unwrap_or(plan.samples));
    random.shuffle(before);
    random.shuffle(last);
    GptIndices::new(words, documents, plan.samples)
}

/// Appends the sample index for the document order that `words` holds.
fn push_starts(words: &mut Vec<u32>, documents: usize, length: impl Fn(u32) -> u32, samples: usize, seq_length: usize) {
    let (mut document, mut offset) = (0, 0);
    words.extend([0, 0]);
    for _ in 0..samples {
        let mut missing = seq_length as u64 + 1;
        loop {
            let left = u64::from(length(words[document]) - offset);
            if left >= missing {
                // The last token of a sample is the first of the next.
                offset += missing as u32 - 1;
                break;
            }
            if document + 1 == documents {
                // Only a partial last sample gets here; it ends with the last token there is.
                while length(words[document]) == 0 {
                    document -= 1;
                }
                offset = length(words[document]) - 1;
                break;
            }
            missing -= left;
            document += 1;
            offset = 0;
        }
        words.extend([document as u32, offset]);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The stream of tokens that the samples divide is the concatenation of the documents in their order, and every
        /// sample but a partial last one has S + 1 tokens, overlapping its neighbours by one.
        #[test]
        fn samples_tile_the_documents(
            lengths in prop::collection::vec(0u32..40, 1..30),
            seq_length in 1usize..50,
            num_samples in prop::option::of(0usize..200),
            seed: u32,
            drop_last: bool,
        ) {
            prop_assume!(lengths.iter().any(|&length| length > 0));
            let (eod_mask_loss, eod_documents, cache) = Default::default();
            let options =
                GptOptions { seq_length, num_samples, seed, drop_last, eod_mask_loss, eod_documents, cache };
            let tokens = lengths.iter().map(|&l| u64::from(l)).sum();
            let plan = EpochPlan::new(tokens, &options).unwrap();
            prop_assert!(plan.samples >= num_samples.unwrap_or(0));
            let indices = build(Vec::new(), 7, &lengths, &plan, &options);

            let documents = plan.epochs as usize * lengths.len();
            let mut uses = vec![0; lengths.len()];
            let mut starts = vec![0]; // of each position in the document order, in tokens
            for position in 0..documents {
                let sequence = indices.document(position) - 7;
                uses[sequence] += 1;
                starts.push(starts[position] + lengths[sequence] as usize);
            }
            prop_assert!(uses.iter().all(|&n| n == plan.epochs));

            let mut seen: Vec<(usize, usize)> = (0..plan.samples).map(|index| {
                let (from, to) = indices.span(index);
                (starts[from.document] + from.offset, starts[to.document] + to.offset)
            }).collect();
            if let Some(before) = plan.shuffled_apart {
                prop_assert!(seen[..before].iter().all(|(from, _)| from / seq_length < before));
            }
            seen.sort_unstable();
            for (sample, (from, to)) in seen.into_iter().enumerate() {
                prop_assert_eq!(from, sample * seq_length);
                let full = (sample + 1) * seq_length;
                prop_assert_eq!(to, if drop_last { full } else { full.min(starts[documents] - 1) });
            }
        }
    }
}
