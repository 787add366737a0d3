//! Reading, tokenizing in parallel and writing in order.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder};
use tempfile::NamedTempFile;
use tokenizers::Tokenizer;

use super::super::indexed::{IndexedWriter, with_suffix};
use super::document::{Field, fields};
use super::encode::Encoder;
use super::source::{Record, Records};
use super::tokenizer::TokenizerChoice;
use super::{KeyOutput, MAX_WORKERS, PreprocessError, PreprocessOptions, PreprocessReport, Progress, Result, Stage};
use crate::partial_file::partial;

/// A batch is read, then tokenized by all workers, then written.
const BATCH_DOCUMENTS: usize = 4096;
const BATCH_BYTES: u64 = 8 << 20;

/// Reads the inputs and writes the outputs. `progress` is told how far the run is, several times a second.
///
/// # Errors
/// When a file cannot be read or written, or at the first document that cannot be read (unless these are skipped); then
/// no output appears.
pub fn prepare(options: &PreprocessOptions, progress: &mut (dyn FnMut(Progress) + Send)) -> Result<PreprocessReport> {
    check(options)?;
    let total_bytes = total_bytes(&options.inputs)?;
    let tokenizer = make_tokenizer(options, total_bytes, progress)?;
    let encoder = Encoder::new(options, tokenizer.as_ref())?;
    let pool = ThreadPoolBuilder::new().num_threads(options.workers.max(1)).build();
    let pool = workers(pool, options.workers)?;

    let dtype = encoder.dtype;
    let mut writers = Vec::new();
    for key in &options.json_keys {
        writers.push(IndexedWriter::create(options.prefix_of(key), dtype)?);
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
                    for (writer, sequences) in writers.iter_mut().zip(keys) {
                        for sequence in sequences {
                            writer.push_encoded(&sequence)?;
                        }
                        writer.end_document();
                    }
                    report.documents += 1;
                }
                Err(error @ PreprocessError::Document { .. }) if options.skip_bad_lines => {
                    report.skipped += 1;
                    report.first_skipped.get_or_insert_with(|| error.to_string());
                }
                Err(error) => return Err(error),
            }
        }
        let (bytes, documents) = (report.bytes, report.documents);
        progress(Progress { stage: Stage::Tokens, bytes, total_bytes, documents });
    }

    if report.documents == 0 {
        let files: Vec<_> = options.inputs.iter().map(|input| input.display().to_string()).collect();
        return Err(PreprocessError::Options(match &report.first_skipped {
            Some(first) => format!("no document can be read, the first not because: {first}"),
            None => format!("there is no document in {}; name files with text", files.join(", ")),
        }));
    }
    // All files are complete before the first one gets its name.
    let made = tokenizer.as_ref().filter(|_| options.tokenizer.is_made_here());
    let made = made.map(|tokenizer| save(tokenizer, &options.output_prefix)).transpose()?;
    let complete = writers.into_iter().map(IndexedWriter::complete).collect::<Result<Vec<_>, _>>()?;
    report.tokenizer = match (&options.tokenizer, made) {
        (TokenizerChoice::File(path), _) => Some(path.clone()),
        (_, Some((path, file))) => {
            file.persist(&path).map_err(|error| PreprocessError::Write { path: path.clone(), cause: error.error })?;
            Some(path)
        }
        (_, None) => None,
    };
    for (key, pair) in options.json_keys.iter().zip(complete) {
        report.outputs.push(KeyOutput { key: key.clone(), prefix: options.prefix_of(key), summary: pair.publish()? });
    }
    report.seconds = start.elapsed().as_secs_f64();
    Ok(report)
}

/// The threads that tokenize.
fn workers(built: Result<ThreadPool, ThreadPoolBuildError>, count: usize) -> Result<ThreadPool> {
    built.map_err(|error| {
        PreprocessError::Options(format!(
            "cannot start {count} workers: {error}; allow more threads (`ulimit -u`, the job's limit), or ask for fewer workers"
        ))
    })
}

/// What is wrong with the options before a file is looked at.
fn check(options: &PreprocessOptions) -> Result<()> {
    let refuse = |what: String| Err(PreprocessError::Options(what));
    let (keys, workers) = (&options.json_keys, options.workers);
    if options.inputs.is_empty() || keys.is_empty() {
        return refuse("at least one input file and one JSON key are needed".into());
    }
    if let Some(twice) = keys.iter().enumerate().find_map(|(index, key)| keys[..index].contains(key).then_some(key)) {
        return refuse(format!("the JSON key '{twice}' is given twice; each has an output of its own, name it once"));
    }
    if options.keep_newlines && options.split_sentences.is_none() {
        return refuse("line breaks are kept anyway where sentences are not split; leave out --keep-newlines".into());
    }
    if workers > MAX_WORKERS {
        return refuse(format!(
            "{workers} workers; at most {MAX_WORKERS} threads tokenize, as many as there are cores do"
        ));
    }
    Ok(())
}

/// A tokenizer that was made here, on disk under a temporary name, and the name it is to get.
fn save(tokenizer: &Tokenizer, prefix: &Path) -> Result<(PathBuf, NamedTempFile)> {
    let path = with_suffix(prefix, "_tokenizer.json");
    let text = tokenizer.to_string(false).map_err(|error| PreprocessError::Tokenizer(error.to_string()))?;
    let written = partial(&path).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.as_file().sync_all()?;
        Ok(file)
    });
    written.map(|file| (path.clone(), file)).map_err(|cause| PreprocessError::Write { path, cause })
}

fn total_bytes(inputs: &[PathBuf]) -> Result<u64> {
    let size = |path: &PathBuf| match fs::metadata(path) {
        Ok(about) if about.is_dir() => {
            let what = format!("{} is a folder; name its .txt, .jsonl or .parquet files", path.display());
            Err(PreprocessError::Options(what))
        }
        about => about.map(|about| about.len()).map_err(|cause| PreprocessError::Read { path: path.clone(), cause }),
    };
    inputs.iter().map(size).sum()
}

fn next_batch(records: &mut Records) -> Result<Vec<Record>> {
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
) -> Result<Option<Tokenizer>> {
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
            let location = record.location;
            fields(record.body, &options.json_keys).map_err(|what| PreprocessError::Document { location, what })
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
    let texts = texts.flatten().flat_map(|field| match field {
        Field::Text(text) => vec![text],
        Field::Sentences(texts) => texts,
        Field::Ids(_) => Vec::new(),
    });
    let tokenizer = options.tokenizer.tokenizer(texts, options.append_eod);
    match failure {
        Some(error) => Err(error),
        None => tokenizer,
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn workers_that_the_system_does_not_start_are_an_error() {
        let refusing = ThreadPoolBuilder::new().spawn_handler(|_| Err(io::ErrorKind::WouldBlock.into()));
        let said = workers(refusing.build(), 3).unwrap_err().to_string();
        assert!(said.starts_with("cannot start 3 workers: ") && said.contains("`ulimit -u`"), "{said}");
    }
}
