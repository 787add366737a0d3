//! Reading, tokenizing in parallel and writing in order.

use std::fs;
use std::path::PathBuf;
use std::time::Instant;

use rayon::prelude::*;
use tokenizers::Tokenizer;

use super::super::indexed::{Dtype, IndexedWriter, with_suffix};
use super::document::{Field, fields};
use super::source::{Record, Records};
use super::tokenizer::{TokenizerChoice, end_of_document, usual_end_tokens, vocab_size};
use super::words::WordEncoder;
use super::{KeyOutput, PreprocessError, PreprocessOptions, PreprocessReport, Progress, Stage};

/// A batch is read, then tokenized by all workers, then written.
const BATCH_DOCUMENTS: usize = 4096;
const BATCH_BYTES: u64 = 8 << 20;

/// Reads the inputs and writes the outputs. `progress` is told how far the run is, several times a second.
///
/// # Errors
/// When a file cannot be read or written, or at the first document that cannot be read (unless these are skipped); then
/// no output appears.
pub fn prepare(
    options: &PreprocessOptions,
    progress: &mut (dyn FnMut(Progress) + Send),
) -> Result<PreprocessReport, PreprocessError> {
    if options.inputs.is_empty() || options.json_keys.is_empty() {
        return Err(PreprocessError::Options("at least one input file and one JSON key are needed".into()));
    }
    let total_bytes = total_bytes(&options.inputs)?;
    let tokenizer = make_tokenizer(options, total_bytes, progress)?;
    let encoder = Encoder::new(options, tokenizer.as_ref())?;
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(options.workers.max(1))
        .build()
        .map_err(|error| PreprocessError::Options(format!("cannot start {} workers: {error}", options.workers)))?;

    let dtype = options.dtype.unwrap_or_else(|| encoder.vocab_size.map_or(Dtype::I32, Dtype::for_vocabulary));
    let prefix_of = |key: &String| with_suffix(&options.output_prefix, &format!("_{key}_document"));
    let mut writers = Vec::new();
    for key in &options.json_keys {
        writers.push(IndexedWriter::create(prefix_of(key), dtype)?);
    }

    let start = Instant::now();
    let mut report = PreprocessReport {
        outputs: Vec::new(),
        documents: 0,
        skipped: 0,
        first_skipped: None,
        bytes: 0,
        seconds: 0.0,
        vocab_size: encoder.vocab_size,
        eod_id: encoder.eod,
        tokenizer: None,
        dtype,
    };
    let mut records = Records::new(options.inputs.clone(), options.text_documents);
    progress(Progress { stage: Stage::Tokens, bytes: 0, total_bytes, documents: 0 });
    loop {
        let batch = next_batch(&mut records)?;
        if batch.is_empty() {
            break;
        }
        report.bytes += batch.iter().map(|record| record.bytes).sum::<u64>();
        let encoded: Vec<_> = pool.install(|| batch.into_par_iter().map(|record| encoder.encode(record)).collect());
        for document in encoded {
            match document {
                Ok(keys) => {
                    for (writer, tokens) in writers.iter_mut().zip(keys) {
                        if !tokens.is_empty() {
                            writer.push_sequence(&tokens)?;
                        }
                        writer.end_document();
                    }
                    report.documents += 1;
                }
                Err(error) if options.skip_bad_lines => {
                    report.skipped += 1;
                    report.first_skipped.get_or_insert_with(|| error.to_string());
                }
                Err(error) => return Err(error),
            }
        }
        let (bytes, documents) = (report.bytes, report.documents);
        progress(Progress { stage: Stage::Tokens, bytes, total_bytes, documents });
    }

    if let (0, Some(first)) = (report.documents, &report.first_skipped) {
        return Err(PreprocessError::Options(format!("no document can be read, the first not because: {first}")));
    }
    for (key, writer) in options.json_keys.iter().zip(writers) {
        report.outputs.push(KeyOutput { key: key.clone(), prefix: prefix_of(key), summary: writer.finish()? });
    }
    report.seconds = start.elapsed().as_secs_f64();
    report.tokenizer = match (&options.tokenizer, &tokenizer) {
        (TokenizerChoice::File(path), _) => Some(path.clone()),
        (_, Some(tokenizer)) => {
            let path = with_suffix(&options.output_prefix, "_tokenizer.json");
            tokenizer
                .save(&path, false)
                .map_err(|error| PreprocessError::Tokenizer(format!("{}: {error}", path.display())))?;
            Some(path)
        }
        (_, None) => None,
    };
    Ok(report)
}

fn total_bytes(inputs: &[PathBuf]) -> Result<u64, PreprocessError> {
    let size = |path: &PathBuf| {
        fs::metadata(path)
            .map(|metadata| metadata.len())
            .map_err(|cause| PreprocessError::Io { path: path.clone(), cause })
    };
    inputs.iter().map(size).sum()
}

fn next_batch(records: &mut Records) -> Result<Vec<Record>, PreprocessError> {
    let (mut batch, mut bytes) = (Vec::new(), 0);
    while batch.len() < BATCH_DOCUMENTS && bytes < BATCH_BYTES {
        let Some(record) = records.next().transpose()? else { break };
        bytes += record.bytes;
        batch.push(record);
    }
    Ok(batch)
}

fn make_tokenizer(
    options: &PreprocessOptions,
    total_bytes: u64,
    progress: &mut (dyn FnMut(Progress) + Send),
) -> Result<Option<Tokenizer>, PreprocessError> {
    if !options.tokenizer.is_made_here() {
        return options.tokenizer.tokenizer(std::iter::empty(), options.append_eod);
    }
    let mut failure = None;
    let (mut bytes, mut documents) = (0, 0);
    // A document that cannot be read ends the text here; with `skip_bad_lines` it is left out here and counted later.
    let texts = Records::new(options.inputs.clone(), options.text_documents).map_while(|record| {
        let read = record.and_then(|record| {
            (bytes, documents) = (bytes + record.bytes, documents + 1);
            if documents % 1024 == 0 {
                progress(Progress { stage: Stage::Tokenizer, bytes, total_bytes, documents });
            }
            let place = record.place;
            fields(record.body, &options.json_keys).map_err(|what| PreprocessError::Document { place, what })
        });
        match read {
            Ok(fields) => Some(fields),
            Err(PreprocessError::Document { .. }) if options.skip_bad_lines => Some(Vec::new()),
            Err(error) => {
                failure = Some(error);
                None
            }
        }
    });
    let texts = texts.flatten().filter_map(|field| match field {
        Field::Text(text) => Some(text),
        Field::Ids(_) => None,
    });
    let tokenizer = options.tokenizer.tokenizer(texts, options.append_eod);
    match failure {
        Some(error) => Err(error),
        None => tokenizer,
    }
}

/// From a document to the token ids of each key.
struct Encoder<'a> {
    tokenizer: Option<&'a Tokenizer>,
    words: Option<WordEncoder<'a>>,
    keys: &'a [String],
    vocab_size: Option<usize>,
    /// Id of the end-of-document token, if there is one.
    eod: Option<i64>,
    append_eod: bool,
}

impl<'a> Encoder<'a> {
    fn new(options: &'a PreprocessOptions, tokenizer: Option<&'a Tokenizer>) -> Result<Self, PreprocessError> {
        let found = tokenizer.and_then(|tokenizer| end_of_document(tokenizer, options.eod_token.as_deref()));
        let eod = options.eod_id.or(found);
        if options.append_eod && eod.is_none() {
            return Err(PreprocessError::Options(match (&options.eod_token, tokenizer) {
                (Some(token), Some(_)) => format!("the tokenizer has no token '{token}' to end a document with"),
                (None, Some(_)) => format!(
                    "the tokenizer has none of the usual end-of-document tokens ({}); name its own one",
                    usual_end_tokens()
                ),
                (_, None) => "token ids can only be ended with an end-of-document token if its id is given".into(),
            }));
        }
        let vocab_size = tokenizer.map(vocab_size).or(options.vocab_size);
        let words = tokenizer.and_then(|tokenizer| WordEncoder::new(tokenizer, options.workers));
        Ok(Self { tokenizer, words, keys: &options.json_keys, vocab_size, eod, append_eod: options.append_eod })
    }

    fn encode(&self, record: Record) -> Result<Vec<Vec<i64>>, PreprocessError> {
        let place = record.place;
        fields(record.body, self.keys)
            .and_then(|fields| fields.into_iter().zip(self.keys).map(|(field, key)| self.ids(field, key)).collect())
            .map_err(|what| PreprocessError::Document { place, what })
    }

    fn ids(&self, field: Field, key: &str) -> Result<Vec<i64>, String> {
        let mut ids = match field {
            Field::Ids(ids) => {
                let limit = self.vocab_size.map_or(i64::MAX, |size| size as i64);
                if let Some(id) = ids.iter().find(|id| !(0..limit).contains(id)) {
                    return Err(format!("key '{key}': token id {id} is outside the vocabulary of {limit}"));
                }
                ids
            }
            Field::Text(text) => {
                let tokenizer = self.tokenizer.ok_or_else(|| {
                    format!("key '{key}' is text, and no tokenizer is chosen (--tokenizer or --train-tokenizer)")
                })?;
                let short_cut = self.words.as_ref().and_then(|words| words.encode(&text));
                let ids = short_cut.unwrap_or_else(|| {
                    let encoding = tokenizer.encode_fast(text, false).map_err(|error| error.to_string())?;
                    Ok(encoding.get_ids().iter().map(|&id| i64::from(id)).collect())
                });
                ids.map_err(|error| format!("key '{key}': {error}"))?
            }
        };
        // Megatron leaves empty documents without their end as well.
        if self.append_eod && !ids.is_empty() {
            ids.extend(self.eod);
        }
        Ok(ids)
    }
}
