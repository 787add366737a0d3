//! Encoded texts in sequences, in an order.

use sha2::{Digest, Sha256};

use super::error::{ChatError, Result};
use super::learned::Tokens;
use super::pack::pack;
use crate::data::Sample;
use crate::data::numpy::{RandomState, epochs};

/// Sequences of groups of texts. The texts of a group, a conversation or the answers of a pair, follow each other in one
/// sequence; each is a document of it. `Known` is what is known of each sequence besides.
#[derive(Clone, Debug)]
pub struct Packed<Known> {
    pub(super) seq_length: usize,
    pub(super) groups: Vec<Vec<Tokens>>,
    /// Groups of each sequence.
    pub(super) sequences: Vec<Vec<usize>>,
    /// Which sequence is read at each index.
    pub(super) order: Vec<u32>,
    /// A hash of the texts.
    pub(super) content: String,
    pub(super) known: Known,
}

impl<Known: Clone + Default> Packed<Known> {
    /// Sequences of `seq_length` predictions, in the order of the packing. Without `packing` a group has a sequence of
    /// its own.
    pub(super) fn new(groups: Vec<Vec<Tokens>>, seq_length: usize, packing: bool) -> Self {
        let mut hash = Sha256::new();
        for Tokens { ids, learned } in groups.iter().flatten() {
            hash.update((ids.len() as u64).to_le_bytes());
            ids.iter().for_each(|id| hash.update(id.to_le_bytes()));
            hash.update(Vec::from_iter(learned.iter().map(|counts| u8::from(*counts))));
        }
        let content = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        let lengths: Vec<usize> = groups.iter().map(|group| length(group)).collect();
        let sequences = if packing { pack(&lengths, seq_length) } else { (0..groups.len()).map(|i| vec![i]).collect() };
        let order = (0..sequences.len() as u32).collect();
        Self { seq_length, groups, sequences, order, content, known: Known::default() }
    }

    /// Tokens that are learned.
    pub(super) fn learned(&self) -> usize {
        self.groups.iter().flatten().map(|text| text.learned[1..].iter().filter(|counts| **counts).count()).sum()
    }

    /// `samples` sequences: epochs, each in an order of its own that follows from the seed.
    pub fn shuffled(mut self, samples: usize, seed: u32) -> Self {
        self.order = epochs(self.sequences.len(), samples, seed);
        self
    }

    /// At most the first `samples` sequences.
    pub fn first(mut self, samples: usize) -> Self {
        self.order.truncate(samples);
        self
    }

    /// The last `share` (0 to 1) of the sequences in an order that follows from the seed, at least one, and the others
    /// before them. `section` is the configuration's.
    ///
    /// # Errors
    /// If there is only one sequence.
    pub fn split(self, share: f64, seed: u32, section: &str) -> Result<[Self; 2]> {
        let count = self.sequences.len();
        if count < 2 {
            let what = format!(
                "{count} sequence of [{section}] cannot be divided into training and validation; name {section}.validation, or set \
                 evaluation.batches = 0"
            );
            return Err(ChatError::Nothing { what });
        }
        let mut all = self.sequences.clone();
        RandomState::new(seed).shuffle(&mut all);
        let held = ((count as f64 * share).round() as usize).clamp(1, count - 1);
        let rest = all.split_off(count - held);
        let part = |sequences: Vec<Vec<usize>>| {
            let order = (0..sequences.len() as u32).collect();
            Self { sequences, order, known: Known::default(), ..self.clone() }
        };
        Ok([part(all), part(rest)])
    }

    /// Sequences of an epoch.
    pub fn sequences(&self) -> usize {
        self.sequences.len()
    }

    /// The share of positions that hold no text.
    pub fn padding(&self) -> f64 {
        let filled: usize = self.sequences.iter().flatten().map(|&group| length(&self.groups[group])).sum();
        1.0 - filled as f64 / (self.sequences.len() * self.seq_length) as f64
    }

    /// The texts of the sequence at `index`, one after the other, then padding that does not count.
    pub(super) fn texts(&self, index: usize) -> Sample {
        let length = self.seq_length;
        let (mut tokens, mut labels) = (Vec::with_capacity(length), Vec::with_capacity(length));
        let (mut mask, mut documents) = (Vec::with_capacity(length), Vec::new());
        let groups = &self.sequences[self.order[index] as usize];
        for Tokens { ids, learned } in groups.iter().flat_map(|&group| &self.groups[group]) {
            documents.push(tokens.len());
            tokens.extend(ids[..ids.len() - 1].iter().map(|id| i64::from(*id)));
            labels.extend(ids[1..].iter().map(|id| i64::from(*id)));
            mask.extend(&learned[1..]);
        }
        tokens.resize(length, 0);
        labels.resize(length, 0);
        mask.resize(length, false);
        Sample { tokens, labels, loss_mask: Some(mask), documents: Some(documents), references: None, taught: None }
    }
}

fn length(group: &[Tokens]) -> usize {
    group.iter().map(Tokens::len).sum()
}
