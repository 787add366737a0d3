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
use super::token_ids::{self, CheckedSequences, Vocabulary};
use crate::config::RunConfig;
use crate::data::preprocess::{
    PreprocessOptions, Progress, TextDocuments, TokenizerChoice, end_of_document, prepare, vocab_size,
};
use crate::data::{Blend, GptSplit, GptSplits, Sample, TokenDataset, read_tokenizer};
use crate::grpo::Reward;

/// Tokens on disk.
#[derive(Clone, Default, Serialize, Deserialize)]
pub(super) struct Tokens {
    /// Of training, or of all that `data.split` divides.
    train: Option<Part>,
    /// Of validation and test, where they have files of their own.
    own: [Option<Part>; 2],
    tokenizer: Option<PathBuf>,
    eod_id: Option<i64>,
    /// A line about them for the user.
    note: Option<String>,
}

/// Files of tokens.
#[derive(Clone, Serialize, Deserialize)]
struct Part {
    blend: Blend,
    /// Hash of all tokens, where they were made from text.
    content: Option<String>,
}

impl Part {
    fn of(prefixes: &[PathBuf], weights: &Option<Vec<f64>>) -> Option<Self> {
        let blend = Blend { prefixes: prefixes.to_vec(), weights: weights.clone() };
        (!prefixes.is_empty()).then_some(Self { blend, content: None })
    }
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
        let [train, valid, test] = tokens.parts();
        // A weighted blend has no end of its own.
        let most = evaluation.batches.max(evaluation.final_batches) * training.global_batch;
        let wanted = [valid, test].map(|part| part.and_then(|part| part.blend.weights.as_ref()).map(|_| most));
        let parts = config.data.samples(training.seq_length, wanted, tokens.eod_id);
        let parts = match (tokens.is_divided(), train) {
            (true, Some(all)) => GptSplits::build(&all.blend, &parts)?,
            _ => GptSplits::build_each([train, valid, test].map(|part| part.map(|part| &part.blend)), &parts)?,
        };

        let vocabulary = config.model.config.vocab_size();
        let open = |data: Option<Arc<GptSplit>>, from: Option<&Part>, name: &'static str, most: usize| match data {
            Some(data) if !data.is_empty() => {
                let content = from.and_then(|part| part.content.clone());
                let sequences = CheckedSequences { sequences: data.len().min(most), data, vocabulary, content };
                Ok(Arc::new(sequences) as Arc<dyn TokenDataset>)
            }
            _ => Err(TrainError::NoSequence { part: name, seq_length: training.seq_length }),
        };
        let learned = open(parts.train, train, "training", usize::MAX)?;
        let watched = match evaluation.batches {
            0 => learned.clone(),
            _ => open(parts.valid.clone(), valid, "validation", usize::MAX)?,
        };
        let most = evaluation.final_batches * training.global_batch;
        let is_some = |data: &Arc<GptSplit>| most > 0 && !data.is_empty();
        let last = match (parts.test.filter(is_some), parts.valid.filter(is_some)) {
            // Files that are named for the test are not replaced by others because they are short.
            (None, _) if most > 0 && tokens.own[1].is_some() => Some(open(None, test, "test", most)?),
            (Some(last), _) => Some(open(Some(last), test, "test", most)?),
            (None, Some(last)) => Some(open(Some(last), valid, "test", most)?),
            (None, None) => None,
        };
        let notes = tokens.note.into_iter().collect();
        Ok(Self { train: learned, valid: watched, last, tokenizer: tokens.tokenizer, notes, grpo: None })
    }
}

impl RunData {
    /// Each part in words that differ where the data does: its sequences, a hash of some of them, and one of what the
    /// teacher's file says of these. Fails if a sequence cannot be read.
    pub(super) fn digest(&self) -> Result<Vec<String>, TrainError> {
        let parts = [("training", Some(&self.train)), ("validation", Some(&self.valid)), ("test", self.last.as_ref())];
        let mut lines = Vec::new();
        for (name, data) in parts.into_iter().filter_map(|(name, data)| Some((name, data?))) {
            let sequences = data.len();
            let some = [0, sequences / 2, sequences.saturating_sub(1)].map(|sequence| data.try_sample(sequence));
            let some: Vec<Sample> = some.into_iter().collect::<Result<_, _>>().map_err(TrainError::Sample)?;
            let hash = |of: &dyn Fn(&Sample) -> String| stable_hash(&some.iter().map(of).collect::<String>());
            let tokens = hash(&|sample| format!("{:?}", sample.tokens));
            lines.push(format!("{sequences} {name} sequences with the hash {tokens:016x}"));
            if some.iter().any(|sample| sample.taught.is_some()) {
                let taught = hash(&|sample| format!("{:?}", sample.taught));
                lines.push(format!(
                    "probabilities of its {name} sequences in distill.logits with the hash {taught:016x}"
                ));
            }
        }
        Ok(lines)
    }
}

impl Tokens {
    /// Those of the prepared data, or of the text, which is tokenized.
    pub fn find(config: &RunConfig, progress: &mut (dyn FnMut(Progress) + Send)) -> Result<Self, TrainError> {
        match (config.has_conversations(), config.data.text.is_empty()) {
            (true, _) => Ok(Self::default()),
            (false, true) => indexed(config),
            (false, false) => tokenize(config, progress),
        }
    }

    /// Whether `data.split` divides the files of training.
    fn is_divided(&self) -> bool {
        self.own.iter().all(Option::is_none)
    }

    /// What a user should know about them.
    pub fn note(self) -> Option<String> {
        self.note
    }

    /// The same, with what there is to say about their ids. Fails if the model, or the tokenizer, lacks some.
    fn check_ids(mut self, config: &RunConfig, tokenizer: Option<&Vocabulary>) -> Result<Self, TrainError> {
        let train = if config.data.text.is_empty() { "data.prefixes" } else { "data.text" };
        let keys = [train, "data.validation", "data.test"];
        let parts = keys.into_iter().zip([&self.train, &self.own[0], &self.own[1]]);
        let parts = parts.filter_map(|(key, part)| Some((key, part.as_ref()?)));
        let files = parts.flat_map(|(key, part)| part.blend.prefixes.iter().map(move |prefix| (key, prefix.as_path())));
        self.note = token_ids::check(config, &files.collect::<Vec<_>>(), tokenizer)?;
        Ok(self)
    }

    /// Where training, validation and test come from.
    fn parts(&self) -> [Option<&Part>; 3] {
        let train = self.train.as_ref();
        match self.is_divided() {
            true => [train; 3],
            false => [train, self.own[0].as_ref(), self.own[1].as_ref()],
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
    let mut written = |key: &'static str, files: &[PathBuf], prefix: PathBuf, tokenizer: TokenizerChoice| {
        let options = PreprocessOptions {
            text_documents,
            eod_id: data.eod_id,
            ..PreprocessOptions::new(files.to_vec(), prefix, tokenizer)
        };
        let report = prepare(&options, progress).map_err(|cause| TrainError::Text { key, cause })?;
        let output = report.outputs.first().expect("one key is asked for");
        let (blend, content) = (Blend::single(&output.prefix), Some(output.summary.content.clone()));
        Ok::<_, TrainError>((Part { blend, content }, report))
    };
    let (train, report) = written("data.text", &data.text, prefix.clone(), tokenizer.clone())?;
    if let Some(size) = report.vocab_size {
        fits(config, size, report.tokenizer.as_deref())?;
    }
    // A tokenizer that was made is made from the text of training alone.
    let tokenizer = report.tokenizer.clone().map_or(tokenizer, TokenizerChoice::File);
    let mut own = |key: &'static str, files: &[PathBuf], name: &str| {
        let part = (!files.is_empty()).then(|| written(key, files, prefix.with_file_name(name), tokenizer.clone()));
        part.transpose().map(|part| part.map(|(part, _)| part))
    };
    let own = [own("data.validation", &data.validation, "validation")?, own("data.test", &data.test, "test")?];
    let tokens = Tokens { train: Some(train), own, tokenizer: report.tokenizer, eod_id: report.eod_id, note: None };
    // Documents may be token ids already.
    tokens.check_ids(config, None)
}

/// Tokens that are on disk already, with what belongs to them.
pub(super) fn indexed(config: &RunConfig) -> Result<Tokens, TrainError> {
    let data = &config.data;
    let (mut eod_id, mut vocabulary) = (data.eod_id, None);
    if let Some((path, tokenizer)) = tokenizer_file(config)? {
        // An end-of-document token of its own need not be the tokenizer's.
        let last = eod_id.and_then(|id| usize::try_from(id).ok()).map_or(0, |id| id + 1);
        vocabulary = Some((path.clone(), vocab_size(&tokenizer).max(last)));
        eod_id = eod_id.or_else(|| end_of_document(&tokenizer, None));
        if eod_id.is_none() && !data.needs_end_of_document().is_empty() {
            let what = "no end-of-document token is known; name its id with data.eod-id".into();
            return Err(TrainError::Tokenizer { path, what });
        }
    }
    let train = Part::of(&data.prefixes, &data.weights);
    let own = [Part::of(&data.validation, &data.validation_weights), Part::of(&data.test, &data.test_weights)];
    let tokens = Tokens { train, own, tokenizer: data.tokenizer.as_ref().map(PathBuf::from), eod_id, note: None };
    tokens.check_ids(config, vocabulary.as_ref())
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
