//! The data sets of a run.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use backend_dist::process::Cluster;
use backend_dist::shard::stable_hash;
use models::ModelConfig;
use serde::{Deserialize, Serialize};
use tokenizers::Tokenizer;

use super::TrainError;
use super::run_data::{RunData, fits};
use crate::config::RunConfig;
use crate::data::preprocess::{
    PreprocessOptions, Progress, TextDocuments, TokenizerChoice, end_of_document, prepare, vocab_size,
};
use crate::data::{Blend, GptSplit, GptSplits, Sample, SampleError, TokenDataset, read_tokenizer};
use crate::grpo::Reward;

/// Tokens on disk.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Tokens {
    blend: Blend,
    tokenizer: Option<PathBuf>,
    eod_id: Option<i64>,
    /// Hash of all tokens, where they were made from text.
    content: Option<String>,
}

impl RunData {
    /// Opens the data of a run. Text is tokenized first, into `data/` of the output folder; `progress` is told how far
    /// that is. Fails if files cannot be read, hold too little, or speak of tokens that the model does not have.
    pub fn open(config: &RunConfig, progress: &mut (dyn FnMut(Progress) + Send)) -> Result<Self, TrainError> {
        Self::open_among(config, &Cluster::from([]), progress)
    }

    /// [`open`](Self::open) in all processes: the first one tokenizes the text before the others look at it.
    ///
    /// Fails as [`open`](Self::open), or if another process fails.
    pub fn open_among(
        config: &RunConfig,
        cluster: &Cluster,
        progress: &mut (dyn FnMut(Progress) + Send),
    ) -> Result<Self, TrainError> {
        let tokens = cluster.from_first(|| Tokens::find(config, progress))?;
        cluster.first_then_others(|| Self::of(config, None, tokens))
    }

    /// Opens the data of a run whose tokens are on disk; `reward` judges completions in place of the configuration's.
    pub(super) fn of(config: &RunConfig, reward: Option<Arc<dyn Reward>>, tokens: Tokens) -> Result<Self, TrainError> {
        if config.chat.is_used() {
            return super::chat::open(config);
        }
        if config.preference.is_used() {
            return super::preference::open(config);
        }
        if config.grpo.is_used() {
            return super::grpo::open(config, reward);
        }
        let (training, evaluation) = (&config.training, &config.evaluation);
        // A weighted blend has no end of its own.
        let most = evaluation.batches.max(evaluation.final_batches) * training.global_batch;
        let validation = tokens.blend.weights.as_ref().map(|_| most);
        let parts = config.data.samples(training.seq_length, validation, tokens.eod_id);
        let parts = GptSplits::build(&tokens.blend, &parts)?;

        let vocabulary = config.model.config.vocab_size();
        let open = |data: Option<Arc<GptSplit>>, name: &'static str, most: usize| match data {
            Some(data) if !data.is_empty() => {
                let content = tokens.content.clone();
                let sequences = CheckedSequences { sequences: data.len().min(most), data, vocabulary, content };
                sequences.spot_check(name)?;
                Ok(Arc::new(sequences) as Arc<dyn TokenDataset>)
            }
            _ => Err(TrainError::NoSequence { part: name, seq_length: training.seq_length }),
        };
        let train = open(parts.train, "training", usize::MAX)?;
        let valid = match evaluation.batches {
            0 => train.clone(),
            _ => open(parts.valid.clone(), "validation", usize::MAX)?,
        };
        let most = evaluation.final_batches * training.global_batch;
        let tests = parts.test.filter(|test| !test.is_empty()).or(parts.valid);
        let last = tests.filter(|tests| most > 0 && !tests.is_empty());
        let last = last.map(|last| open(Some(last), "test", most)).transpose()?;
        Ok(Self { train, valid, last, tokenizer: tokens.tokenizer, notes: vec![], grpo: None })
    }
}

impl RunData {
    /// Each part in words that differ where the data does: its sequences, and a hash of some of them. Fails if a
    /// sequence cannot be read.
    pub(super) fn digest(&self) -> Result<Vec<String>, TrainError> {
        let of = |name: &str, data: &Arc<dyn TokenDataset>| {
            let sequences = data.len();
            let some = [0, sequences / 2, sequences.saturating_sub(1)];
            let tokens = some.map(|sequence| Ok(format!("{:?}", data.try_sample(sequence)?.tokens)));
            let tokens: Result<Vec<String>, SampleError> = tokens.into_iter().collect();
            let hash = stable_hash(&tokens.map_err(TrainError::Sample)?.concat());
            Ok(format!("{sequences} {name} sequences with the hash {hash:016x}"))
        };
        let parts = [("training", Some(&self.train)), ("validation", Some(&self.valid)), ("test", self.last.as_ref())];
        parts.into_iter().filter_map(|(name, data)| data.map(|data| of(name, data))).collect()
    }
}

impl Tokens {
    /// Those of the prepared data, or of the text, which is tokenized.
    pub fn find(config: &RunConfig, progress: &mut (dyn FnMut(Progress) + Send)) -> Result<Self, TrainError> {
        match (config.has_conversations(), config.data.text.is_empty()) {
            (true, _) => Ok(Self { blend: config.data.blend(), tokenizer: None, eod_id: None, content: None }),
            (false, true) => indexed(config),
            (false, false) => tokenize(config, progress),
        }
    }
}

/// Where the tokens of a text are written, without the key and the suffix.
pub(super) fn text_prefix(config: &RunConfig) -> PathBuf {
    config.output.directory.join("data").join("text")
}

fn tokenize(config: &RunConfig, progress: &mut (dyn FnMut(Progress) + Send)) -> Result<Tokens, TrainError> {
    let data = &config.data;
    let tokenizer = match data.tokenizer.as_deref() {
        None => TokenizerChoice::None,
        Some("bpe") => TokenizerChoice::TrainBpe(data.bpe_size),
        Some("char") => TokenizerChoice::Characters,
        Some("byte") => TokenizerChoice::Bytes,
        Some(path) => TokenizerChoice::File(path.into()),
    };
    let text_documents = match data.text_documents.as_str() {
        "line" => TextDocuments::Line,
        "file" => TextDocuments::File,
        _ => TextDocuments::Paragraph,
    };
    // Not after hours of tokenizing.
    tokenizer_file(config)?;
    let prefix = text_prefix(config);
    let folder = prefix.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).map_err(|cause| TrainError::Io { path: folder.into(), cause })?;
    let options = PreprocessOptions {
        text_documents,
        eod_id: data.eod_id,
        ..PreprocessOptions::new(data.text.clone(), prefix, tokenizer)
    };
    let report = prepare(&options, progress)?;
    if let Some(size) = report.vocab_size {
        fits(config, size, report.tokenizer.as_deref())?;
    }
    let output = report.outputs.first().expect("one key is asked for");
    let (blend, content) = (Blend::single(&output.prefix), Some(output.summary.content.clone()));
    Ok(Tokens { blend, tokenizer: report.tokenizer, eod_id: report.eod_id, content })
}

fn indexed(config: &RunConfig) -> Result<Tokens, TrainError> {
    let data = &config.data;
    let mut eod_id = data.eod_id;
    if let Some((path, tokenizer)) = tokenizer_file(config)? {
        eod_id = eod_id.or_else(|| end_of_document(&tokenizer, None));
        if eod_id.is_none() && !data.needs_end_of_document().is_empty() {
            let what = "no end-of-document token is known; name its id with data.eod-id".into();
            return Err(TrainError::Tokenizer { path, what });
        }
    }
    Ok(Tokens { blend: data.blend(), tokenizer: data.tokenizer.as_ref().map(PathBuf::from), eod_id, content: None })
}

/// The file of `data.tokenizer`, if it is one, and what it holds: a tokenizer that is not too large for the model.
pub(super) fn tokenizer_file(config: &RunConfig) -> Result<Option<(PathBuf, Tokenizer)>, TrainError> {
    let named = config.data.tokenizer.as_deref().filter(|name| !["char", "byte", "bpe"].contains(name));
    let Some(path) = named.map(PathBuf::from) else { return Ok(None) };
    let tokenizer =
        read_tokenizer(&path).map_err(|error| TrainError::Tokenizer { path: path.clone(), what: error.to_string() })?;
    fits(config, vocab_size(&tokenizer), Some(&path))?;
    Ok(Some((path, tokenizer)))
}

/// The first sequences of a part of the data, each checked against the model's vocabulary when it is read.
struct CheckedSequences {
    data: Arc<GptSplit>,
    sequences: usize,
    vocabulary: usize,
    /// Hash of all tokens, if it is known.
    content: Option<String>,
}

/// Sequences of a part that are checked before the run starts.
const SPOT_CHECKS: usize = 1000;

impl CheckedSequences {
    fn outside(&self, sample: &Sample) -> Option<i64> {
        let known = 0..self.vocabulary as i64;
        sample.tokens.iter().chain(&sample.labels).find(|id| !known.contains(*id)).copied()
    }

    /// Looks for tokens that the model lacks in sequences from all over the part.
    fn spot_check(&self, part: &'static str) -> Result<(), TrainError> {
        let every = self.sequences.div_ceil(SPOT_CHECKS).max(1);
        for sequence in (0..self.sequences).step_by(every).chain([self.sequences / 2, self.sequences.saturating_sub(1)])
        {
            if let Some(id) = self.outside(&self.data.try_sample(sequence).map_err(TrainError::Sample)?) {
                return Err(TrainError::Token { part, sequence, id, vocabulary: self.vocabulary });
            }
        }
        Ok(())
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
