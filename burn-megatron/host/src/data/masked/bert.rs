//! Megatron's `BERTMaskedWordPieceDataset` (`megatron/core/datasets/bert_dataset.py`).

use super::dataset::{MaskedDataset, SampleOptions};
use super::mapping::{Mapping, SampleSentences};
use super::masking::Masking;
use super::{MaskedError, Result};
use crate::data::numpy::RandomState;

/// Stands for a token that is not masked.
const NO_LABEL: i64 = -1;

/// How samples are made.
#[derive(Clone, Debug, PartialEq)]
pub struct BertOptions {
    /// Tokens of a sample, with `[CLS]` and two `[SEP]`.
    pub seq_length: usize,
    /// Samples wanted; `None` is one epoch.
    pub num_samples: Option<usize>,
    /// At least 1.
    pub seed: u32,
    /// Share of samples that are truncated to a random shorter length.
    pub short_sequence_probability: f64,
    /// Which tokens are masked.
    pub masking: Masking,
    /// Whether a sample has two parts, of which one follows the other or the other way round.
    pub classification_head: bool,
}

impl BertOptions {
    /// As Megatron's `pretrain_bert.py` has them by default: 15 % of the tokens, whole words, spans of up to three words, a
    /// tenth of the samples short.
    pub fn new(seq_length: usize, seed: u32) -> Self {
        let masking =
            Masking { probability: 0.15, max_ngram: 3, whole_words: true, favor_long: false, geometric: false };
        let short_sequence_probability = 0.1;
        Self { seq_length, num_samples: None, seed, short_sequence_probability, masking, classification_head: true }
    }
}

impl SampleOptions for BertOptions {
    fn check(&self) -> Result<()> {
        self.masking.check()?;
        super::check_order(self.seed, self.short_sequence_probability)?;
        if self.seq_length < 5 {
            let (value, legal) = (self.seq_length.to_string(), "5: [CLS], two tokens and two [SEP]".into());
            return Err(MaskedError::Option { name: "seq_length", value, legal });
        }
        Ok(())
    }

    fn mapping(&self) -> Mapping {
        Mapping {
            num_samples: self.num_samples,
            max_length: self.seq_length - 3,
            short_sequence_probability: self.short_sequence_probability,
            seed: self.seed,
            min_sentences: if self.classification_head { 2 } else { 1 },
        }
    }
}

/// A sample; all lists have the sequence's length.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BertSample {
    /// `[CLS]`, the first part, `[SEP]`, the second part, `[SEP]`, padding.
    pub tokens: Vec<i64>,
    /// 1 in the second part.
    pub types: Vec<i64>,
    /// What a masked token was; -1 elsewhere.
    pub labels: Vec<i64>,
    /// 1, and 0 at padding.
    pub padding_mask: Vec<i64>,
    /// Whether the parts are in the other order.
    pub is_random: bool,
    /// Whether tokens were cut off.
    pub truncated: bool,
}

/// Samples of [`BertOptions`].
pub type BertDataset = MaskedDataset<BertOptions>;

impl BertDataset {
    /// The sample at an index.
    ///
    /// # Errors
    /// When the `.bin` file can no longer be read, or has a token that is not in the vocabulary.
    ///
    /// # Panics
    /// When `index` is not below [`len`](Self::len).
    pub fn sample(&self, index: usize) -> Result<BertSample> {
        let SampleSentences { sentences, target } = self.samples[index].clone();
        let mut random = RandomState::new(self.options.seed.wrapping_add(index as u32));
        let mut pivot = sentences.len();
        let mut is_random = false;
        if self.options.classification_head {
            pivot = if sentences.len() >= 3 { 1 + random.below(sentences.len() as u32 - 1) as usize } else { 1 };
            is_random = random.uniform() < 0.5;
        }
        let read = |sentences| super::read(&self.sentences, sentences, &self.vocabulary);
        let middle = sentences.start + pivot;
        let mut parts = [read(sentences.start..middle)?, read(middle..sentences.end)?];
        if is_random {
            parts.swap(0, 1);
        }
        let truncated = truncate(&mut parts, target, &mut random);
        Ok(self.assemble(&parts, target, &mut random, is_random, truncated))
    }

    fn assemble(
        &self,
        [first, second]: &[Vec<i64>; 2],
        target: usize,
        random: &mut RandomState,
        is_random: bool,
        truncated: bool,
    ) -> BertSample {
        let vocabulary = &self.vocabulary;
        let mut tokens = [&[vocabulary.cls], &first[..], &[vocabulary.sep]].concat();
        let mut types = vec![0; tokens.len()];
        if !second.is_empty() {
            tokens.extend(second.iter().chain([&vocabulary.sep]));
            types.resize(tokens.len(), 1);
        }
        let size = vocabulary.continues.len() as u32;
        let masked = self.options.masking.mask(&tokens, target, vocabulary, random, |random| {
            if random.uniform() < 0.8 {
                return Some(vocabulary.mask);
            }
            (random.uniform() >= 0.5).then(|| random.below(size).into())
        });
        let length = self.options.seq_length;
        let mut labels = vec![NO_LABEL; length];
        for position in masked.spans.concat() {
            labels[position] = tokens[position];
        }
        let mut tokens = masked.tokens;
        tokens.resize(length, vocabulary.pad);
        types.resize(length, 0);
        // A masked token that chance replaces by the padding is padding, as in Megatron.
        let padding_mask = tokens.iter().map(|token| i64::from(*token != vocabulary.pad)).collect();
        BertSample { tokens, types, labels, padding_mask, is_random, truncated }
    }
}

/// Truncates the longer part at either end until both have `target` tokens together. Whether any were.
fn truncate(parts: &mut [Vec<i64>; 2], target: usize, random: &mut RandomState) -> bool {
    let mut truncated = false;
    while parts[0].len() + parts[1].len() > target {
        let longer = usize::from(parts[0].len() <= parts[1].len());
        if random.uniform() < 0.5 {
            parts[longer].remove(0);
        } else {
            parts[longer].pop();
        }
        truncated = true;
    }
    truncated
}
