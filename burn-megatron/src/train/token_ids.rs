//! Whether the tokens on disk are those of the model and of the tokenizer.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use models::ModelConfig;

use super::TrainError;
use crate::config::RunConfig;
use crate::data::indexed::{IndexedDataset, IndexedError};
use crate::data::{DataError, GptSplit, Sample, SampleError, TokenDataset, tokenizer_path};

/// Places of all files of a run that are looked at before it starts.
const PLACES: usize = 1000;

/// Tokens of each.
const PLACE: usize = 1024;

/// A tokenizer file and the size of its vocabulary.
pub(super) type Vocabulary = (PathBuf, usize);

/// Looks for tokens that the model or `tokenizer` lacks, in places all over the files of these keys. A tokenizer that the
/// user has not named is no error, but a line about it is returned.
pub(super) fn check(
    config: &RunConfig,
    files: &[(&'static str, &Path)],
    tokenizer: Option<&Vocabulary>,
) -> Result<Option<String>, TrainError> {
    let (vocabulary, places) = (config.model.config.vocab_size(), (PLACES / files.len().max(1)).max(16));
    let mut note = None;
    for (key, prefix) in files {
        let data = IndexedDataset::open(prefix).map_err(DataError::from)?;
        let Some(ids) = ids(&data, places).map_err(DataError::from)? else { continue };
        let known = |size: usize| (0..size as i64).contains(ids.start()) && (0..size as i64).contains(ids.end());
        if !known(vocabulary) {
            let id = if *ids.start() < 0 { *ids.start() } else { *ids.end() };
            let (prefix, advice) = (prefix.to_path_buf(), advice(config, id));
            return Err(TrainError::Token { key, prefix, id, vocabulary, advice });
        }
        let Some((path, tokens)) = tokenizer.filter(|(_, tokens)| !known(*tokens)) else { continue };
        let (path, tokens, ids) = (path.clone(), *tokens, *ids.end() + 1);
        let other = TrainError::OtherTokenizer { path, tokens, key, ids };
        if !is_of_model(config) {
            return Err(other);
        }
        note = note.or_else(|| Some(format!("{other}; it is the one of model.hf")));
    }
    Ok(note)
}

/// Whether the tokenizer is the one that follows from `model.hf`.
fn is_of_model(config: &RunConfig) -> bool {
    let own = config.model.hf.as_deref().map(tokenizer_path);
    own.is_some_and(|own| config.data.tokenizer.as_deref().is_some_and(|named| own == Path::new(named)))
}

/// What to do about an id that the model lacks.
fn advice(config: &RunConfig, id: i64) -> String {
    match &config.model.hf {
        _ if id < 0 => "the least legal is 0".into(),
        None => format!("nearest legal: {}, or the size of the tokenizer that wrote it", id + 1),
        Some(folder) => format!("{} has no more: name data that its tokenizer wrote", folder.display()),
    }
}

/// The least and the greatest token in so many places all over a data set; of a small one all tokens are looked at.
fn ids(data: &IndexedDataset, places: usize) -> Result<Option<RangeInclusive<i64>>, IndexedError> {
    let between = (data.num_tokens() / places).saturating_sub(PLACE);
    let (mut tokens, mut ends, mut next) = (Vec::new(), 0, 0);
    let mut found: Option<RangeInclusive<i64>> = None;
    for (sequence, length) in data.lengths().iter().map(|length| *length as usize).enumerate() {
        let starts = ends;
        ends += length;
        while next < ends {
            let from = next - starts;
            let to = length.min(from + PLACE);
            tokens.clear();
            data.read(sequence, from..to, &mut tokens)?;
            for id in &tokens {
                found = Some(found.map_or(*id..=*id, |all| *all.start().min(id)..=*all.end().max(id)));
            }
            next = starts + to + between;
        }
    }
    Ok(found)
}

/// The first sequences of a part of the data, each checked against the model's vocabulary when it is read.
pub(super) struct CheckedSequences {
    pub data: Arc<GptSplit>,
    pub sequences: usize,
    pub vocabulary: usize,
    /// Hash of all tokens, if it is known.
    pub content: Option<String>,
}

impl CheckedSequences {
    fn outside(&self, sample: &Sample) -> Option<i64> {
        let known = 0..self.vocabulary as i64;
        sample.tokens.iter().chain(&sample.labels).find(|id| !known.contains(*id)).copied()
    }
}

impl TokenDataset for CheckedSequences {
    fn len(&self) -> usize {
        self.sequences
    }

    fn seq_length(&self) -> usize {
        self.data.seq_length()
    }

    fn content(&self) -> Result<Option<String>, SampleError> {
        if let Some(content) = &self.content { Ok(Some(content.clone())) } else { self.data.content() }
    }

    fn sample(&self, index: usize) -> Sample {
        self.try_sample(index).unwrap_or_else(|error| panic!("{error}"))
    }

    /// # Errors
    /// Also if a token is none of the model's: its embedding would silently be zero.
    fn try_sample(&self, index: usize) -> Result<Sample, SampleError> {
        let sample = self.data.try_sample(index)?;
        if let Some(id) = self.outside(&sample) {
            let vocabulary = self.vocabulary;
            let what = "they do not belong together";
            return Err(format!(
                "sequence {index} of the data has token {id}, but model.vocab-size = {vocabulary}: {what}"
            )
            .into());
        }
        Ok(sample)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::indexed::{Dtype, IndexedWriter};

    #[test]
    fn a_small_data_set_is_looked_at_whole_and_a_large_one_everywhere() {
        let folder = tempfile::tempdir().unwrap();
        let prefix = folder.path().join("some");
        let mut writer = IndexedWriter::create(&prefix, Dtype::I32).unwrap();
        for document in 0..300i64 {
            let tokens: Vec<i64> = (0..document % 40).map(|token| token + document).collect();
            writer.push_sequence(&tokens).unwrap();
            writer.end_document();
        }
        // Longer than what is looked at of it.
        writer.push_sequence(&(0..20_000).collect::<Vec<i64>>()).unwrap();
        writer.finish().unwrap();
        let data = IndexedDataset::open(&prefix).unwrap();
        assert_eq!(ids(&data, 1000).unwrap(), Some(0..=19_999));
        let some = ids(&data, 8).unwrap().unwrap();
        assert!((17_000..20_000).contains(some.end()), "{some:?}");
    }
}
