//! The section `[data]`: what a run reads.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::data::{GptDataConfig, SplitRatios};

/// `[data]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct DataSection {
    /// Prefixes of `.bin`/`.idx` pairs.
    pub prefixes: Vec<PathBuf>,
    /// Blend weight of each prefix.
    pub weights: Option<Vec<f64>>,
    /// Text files to tokenize at the start.
    pub text: Vec<PathBuf>,
    /// Validation data of its own: prefixes, or text files where there is a text.
    #[serde(default)]
    pub validation: Vec<PathBuf>,
    /// Blend weight of each of its prefixes.
    #[serde(default)]
    pub validation_weights: Option<Vec<f64>>,
    /// Test data of its own.
    #[serde(default)]
    pub test: Vec<PathBuf>,
    /// Blend weight of each of its prefixes.
    #[serde(default)]
    pub test_weights: Option<Vec<f64>>,
    /// Document of a text file: `paragraph`, `line` or `file`.
    pub text_documents: String,
    /// A `tokenizer.json`, or `char`, `byte`, `bpe`.
    pub tokenizer: Option<String>,
    /// Vocabulary size of a tokenizer trained here.
    pub bpe_size: usize,
    /// Proportions of training, validation and test.
    pub split: SplitRatios,
    /// Training samples that are shuffled in advance.
    pub samples: usize,
    /// Seed of the sample order.
    pub seed: u32,
    /// Attention is restricted to within documents.
    #[serde(default)]
    pub reset_attention_mask: bool,
    /// Position ids restart at each document.
    #[serde(default)]
    pub reset_position_ids: bool,
    /// Mask the loss at end-of-document tokens.
    pub eod_mask_loss: bool,
    /// Id of the end-of-document token.
    pub eod_id: Option<i64>,
    /// Keep the last, partial validation sequence.
    pub keep_partial_validation: bool,
    /// Folder that caches sample orders.
    pub cache: Option<PathBuf>,
}

impl DataSection {
    /// Keys that are set and need the id of the end-of-document token.
    pub fn needs_end_of_document(&self) -> Vec<&'static str> {
        let keys = [
            ("data.eod-mask-loss", self.eod_mask_loss),
            ("data.reset-attention-mask", self.reset_attention_mask),
            ("data.reset-position-ids", self.reset_position_ids),
        ];
        keys.into_iter().filter(|(_, set)| *set).map(|(key, _)| key).collect()
    }

    /// Validation and test data with files of their own, by key.
    pub fn files_of_their_own(&self) -> Vec<(&'static str, &[PathBuf])> {
        let all = [("data.validation", &self.validation), ("data.test", &self.test)];
        all.into_iter().filter(|(_, files)| !files.is_empty()).map(|(key, files)| (key, files.as_slice())).collect()
    }

    /// The samples of `seq_length` tokens, so many of them for validation and for the test (`None`: all that there are).
    pub fn samples(
        &self,
        seq_length: usize,
        [validation, test]: [Option<usize>; 2],
        eod_id: Option<i64>,
    ) -> GptDataConfig {
        GptDataConfig {
            seq_length,
            seed: self.seed,
            split: self.split.clone(),
            num_samples: [Some(self.samples), validation, test],
            eod_mask_loss: eod_id.filter(|_| self.eod_mask_loss),
            eod_documents: eod_id.filter(|_| self.reset_attention_mask || self.reset_position_ids),
            keep_partial_validation: self.keep_partial_validation,
            cache: self.cache.clone(),
        }
    }
}
