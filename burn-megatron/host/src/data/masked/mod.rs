//! Megatron's masked datasets (`megatron/core/datasets/masked_dataset.py`): which sentences a sample has, and which of
//! their tokens are masked, are functions of the seed and the sample's index, draw for draw as numpy makes them.

mod bert;
mod dataset;
mod mapping;
mod masking;
mod mersenne64;
mod t5;

use std::ops::Range;

use thiserror::Error;

use super::indexed::{IndexedDataset, IndexedError};

pub use bert::{BertDataset, BertOptions, BertSample};
pub use dataset::{MaskedDataset, SampleOptions};
pub use mapping::{Mapping, SampleSentences};
pub use masking::Masking;
pub use t5::{T5Dataset, T5Options, T5Sample};

/// What masking needs to know of a tokenizer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MaskVocabulary {
    /// Begins a sample.
    pub cls: i64,
    /// Ends a sentence.
    pub sep: i64,
    /// Stands for a masked token.
    pub mask: i64,
    /// Fills a sample. Megatron fills masks with it too, so that it has to be 0.
    pub pad: i64,
    /// By token: whether it continues a word, as WordPiece's `##ing` does.
    pub continues: Vec<bool>,
}

impl MaskVocabulary {
    /// Of WordPiece tokens by id, with the names that BERT has for the special ones.
    ///
    /// # Errors
    /// If one of `[CLS]`, `[SEP]`, `[MASK]` and `[PAD]` is not there, or `[PAD]` is not 0.
    pub fn word_piece<'a>(tokens: impl IntoIterator<Item = &'a str>) -> Result<Self> {
        let tokens: Vec<&str> = tokens.into_iter().collect();
        let id = |name: &'static str| {
            let found = tokens.iter().position(|token| *token == name);
            found.map(|id| id as i64).ok_or(MaskedError::Special { name })
        };
        let continues = tokens.iter().map(|token| token.starts_with("##")).collect();
        let known = Self { cls: id("[CLS]")?, sep: id("[SEP]")?, mask: id("[MASK]")?, pad: id("[PAD]")?, continues };
        known.check()?;
        Ok(known)
    }

    fn check(&self) -> Result<()> {
        let size = self.continues.len();
        for (name, id) in [("cls", self.cls), ("sep", self.sep), ("mask", self.mask), ("pad", self.pad)] {
            if !usize::try_from(id).is_ok_and(|id| id < size) {
                return Err(MaskedError::Option {
                    name,
                    value: id.to_string(),
                    legal: format!("0 to {}", size.max(1) - 1),
                });
            }
        }
        match self.pad {
            0 => Ok(()),
            pad => Err(MaskedError::Option { name: "pad", value: pad.to_string(), legal: "0".into() }),
        }
    }
}

/// Refuses what no order of samples can be made of.
fn check_order(seed: u32, short_sequence_probability: f64) -> Result<()> {
    let refuse = |name, value: String, legal: &str| Err(MaskedError::Option { name, value, legal: legal.into() });
    if seed == 0 {
        return refuse("seed", "0".into(), "1");
    }
    if !(0.0..=1.0).contains(&short_sequence_probability) {
        return refuse("short_sequence_probability", short_sequence_probability.to_string(), "0 to 1");
    }
    Ok(())
}

/// The tokens of some sentences.
fn read(dataset: &IndexedDataset, sentences: Range<usize>, vocabulary: &MaskVocabulary) -> Result<Vec<i64>> {
    let mut tokens = Vec::new();
    for sentence in sentences {
        tokens.extend(dataset.sequence(sentence)?);
        let size = vocabulary.continues.len();
        let is_known = |token: &i64| usize::try_from(*token).is_ok_and(|token| token < size);
        if let Some(&token) = tokens.iter().find(|token| !is_known(token)) {
            let path = dataset.bin_path().display().to_string();
            return Err(MaskedError::Token { path, sentence, token, most: size - 1 });
        }
    }
    Ok(tokens)
}

/// Why there is no masked dataset, or no sample of one.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum MaskedError {
    /// A tokenizer lacks a token.
    #[error("the vocabulary has no token {name}")]
    Special { name: &'static str },
    /// An option is out of range.
    #[error("{name} = {value}; nearest legal: {legal}")]
    Option { name: &'static str, value: String, legal: String },
    /// A sentence was made with another tokenizer.
    #[error("{path}: sequence {sentence} has token {token}; the vocabulary has 0 to {most}")]
    Token { path: String, sentence: usize, token: i64, most: usize },
    /// The file can no longer be read.
    #[error(transparent)]
    Indexed(#[from] IndexedError),
    /// Documents that the file does not have.
    #[error("{path}: documents {documents:?}; legal: within 0..{most}")]
    Documents { path: String, documents: Range<usize>, most: usize },
    /// The masked tokens of a sample are too many.
    #[error(
        "sample {index} needs {spans} sentinels and {tokens} tokens of output; there are {sentinels} sentinels and \
         decoder_seq_length = {length}"
    )]
    Output { index: usize, spans: usize, tokens: usize, sentinels: usize, length: usize },
    /// No document makes a sample.
    #[error(
        "{path}: none of {documents} documents makes a sample: it needs at least {sentences} sentences, each a sequence of the \
         file, of at most 512 tokens"
    )]
    Empty { path: String, documents: usize, sentences: usize },
}

/// What makes samples with masked tokens.
pub type Result<T, E = MaskedError> = std::result::Result<T, E>;
