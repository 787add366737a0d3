//! Text files to Megatron's `.bin`/`.idx`.
//!
//! [`prepare`] reads `.txt`, `.jsonl`, `.json` and `.parquet` files, makes or loads a tokenizer, and writes
//! `{prefix}_{key}_document.bin/.idx` for every JSON key, or `{prefix}_{key}_sentence.bin/.idx` whose sequences are sentences. The result depends on the input and the options only, not on
//! the number of workers.
//!
//! ```
//! use host::data::indexed::IndexedDataset;
//! use host::data::preprocess::{PreprocessOptions, TokenizerChoice, prepare};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let folder = folder.path();
//! let book = folder.join("book.txt");
//! std::fs::write(&book, "A first paragraph.\n\nA second paragraph.\n")?;
//! let options = PreprocessOptions::new(vec![book], folder.join("book"), TokenizerChoice::TrainBpe(260));
//! let report = prepare(&options, &mut |_progress| {})?;
//! assert_eq!(report.documents, 2);
//! assert_eq!(report.tokenizer, Some(folder.join("book_tokenizer.json")));
//! let data = IndexedDataset::open(&report.outputs[0].prefix)?;
//! assert_eq!(data.sequence(1)?.last().copied(), report.eod_id);
//! # Ok(())
//! # }
//! ```

mod document;
mod encode;
mod fast_bpe;
mod long_texts;
mod pipeline;
mod pretokenize;
mod sentences;
mod source;
mod tokenizer;
mod word_piece;

use std::fmt;
use std::io;
use std::path::PathBuf;

use thiserror::Error;

use super::indexed::{Dtype, IndexedError, IndexedSummary, with_suffix};
use crate::refusal::{Access, advice};
pub use pipeline::prepare;
pub use sentences::Sentences;
pub use source::TextDocuments;
pub use tokenizer::{SMALLEST_BPE, TokenizerChoice, end_of_document, vocab_size};
pub use word_piece::SMALLEST_WORD_PIECE;

/// Entries of the largest vocabulary that is trained: several times those of any known model.
pub const LARGEST_BPE: usize = 1 << 20;

/// Most threads that tokenize.
pub const MAX_WORKERS: usize = 1024;

/// What to prepare, and how.
#[derive(Clone, Debug)]
pub struct PreprocessOptions {
    /// Files in order. `.jsonl`, `.jsonlines` and `.ndjson`: a document per line; `.json`: the same, or one array of documents;
    /// `.parquet`: a document per row, whose columns are keys; everything else is text.
    pub inputs: Vec<PathBuf>,
    /// Outputs are named `{prefix}_{key}_document`, or `{prefix}_{key}_sentence`.
    pub output_prefix: PathBuf,
    /// Keys of a JSON document to take; each becomes an output. A key that holds an array of integers is taken as token
    /// ids. Text files, and JSON documents that are no objects, have one value, which gets the only key.
    pub json_keys: Vec<String>,
    /// Where the tokenizer comes from.
    pub tokenizer: TokenizerChoice,
    /// Whether to end each document with the end-of-document token.
    pub append_eod: bool,
    /// The end-of-document token; `None` looks for the usual ones (see [`end_of_document`]).
    pub eod_token: Option<String>,
    /// Id of the end-of-document token, for documents that are token ids already.
    pub eod_id: Option<i64>,
    /// Size of the vocabulary, if no tokenizer says it; ids outside are refused.
    pub vocab_size: Option<usize>,
    /// Element type of the `.bin`; `None` is `uint16` below 65,500 entries in the vocabulary, else `int32`.
    pub dtype: Option<Dtype>,
    /// What a document is in a text file.
    pub text_documents: TextDocuments,
    /// How documents are split into sentences, each a sequence, as BERT's and T5's data are (Megatron-LM's
    /// `--split-sentences`); keys that are arrays of texts have their sentences already. Without it a document is one sequence.
    pub split_sentences: Option<Sentences>,
    /// Whether sentences keep the white space behind them, line breaks too.
    pub keep_newlines: bool,
    /// Threads that tokenize, at most [`MAX_WORKERS`].
    pub workers: usize,
    /// Whether documents that cannot be read are left out and counted instead of ending the run.
    pub skip_bad_lines: bool,
}

impl PreprocessOptions {
    /// The key `text` of `inputs`, on all cores, with every document ended by the end-of-document token.
    pub fn new(inputs: Vec<PathBuf>, output_prefix: impl Into<PathBuf>, tokenizer: TokenizerChoice) -> Self {
        Self {
            inputs,
            output_prefix: output_prefix.into(),
            json_keys: vec!["text".into()],
            tokenizer,
            append_eod: true,
            eod_token: None,
            eod_id: None,
            vocab_size: None,
            dtype: None,
            text_documents: TextDocuments::Paragraph,
            split_sentences: None,
            keep_newlines: false,
            workers: std::thread::available_parallelism().map_or(1, usize::from),
            skip_bad_lines: false,
        }
    }

    /// The prefix of a key's output.
    fn prefix_of(&self, key: &str) -> PathBuf {
        let level = if self.split_sentences.is_some() { "sentence" } else { "document" };
        with_suffix(&self.output_prefix, &format!("_{key}_{level}"))
    }
}

/// What [`prepare`] wrote.
#[derive(Clone, Debug)]
pub struct PreprocessReport {
    /// One per key, in the order of the keys.
    pub outputs: Vec<KeyOutput>,
    /// Documents read and written.
    pub documents: u64,
    /// Documents left out because they cannot be read.
    pub skipped: u64,
    /// What was wrong with the first of them.
    pub first_skipped: Option<String>,
    /// Bytes read.
    pub bytes: u64,
    /// Wall time of tokenizing, without making the tokenizer.
    pub seconds: f64,
    /// Size of the vocabulary, if known.
    pub vocab_size: Option<usize>,
    /// Id of the end-of-document token, if there is one.
    pub eod_id: Option<i64>,
    /// The tokenizer: the file given, or the one made and saved next to the output.
    pub tokenizer: Option<PathBuf>,
    /// Element type of the `.bin`.
    pub dtype: Dtype,
}

/// One dataset that was written.
#[derive(Clone, Debug)]
pub struct KeyOutput {
    /// JSON key.
    pub key: String,
    /// Prefix of the `.bin`/`.idx` pair.
    pub prefix: PathBuf,
    /// Its size.
    pub summary: IndexedSummary,
}

/// How far a run is.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// What is being done.
    pub stage: Stage,
    /// Bytes of the input read in this stage.
    pub bytes: u64,
    /// Bytes of the input.
    pub total_bytes: u64,
    /// Documents done in this stage.
    pub documents: u64,
}

/// A pass over the input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Making the tokenizer.
    Tokenizer,
    /// Tokenizing and writing.
    Tokens,
}

/// Where a document was read: file and line, element of its array, or row of its table.
#[derive(Clone, Debug)]
pub struct Location {
    /// Input file.
    pub file: PathBuf,
    /// Line of the file, element of its array, or row of its table, from 1.
    pub line: u64,
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file.display(), self.line)
    }
}

/// Why text cannot be prepared.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum PreprocessError {
    /// The operating system refuses to read.
    #[error("cannot read {}: {cause}{}", path.display(), advice(Access::Read, cause))]
    Read { path: PathBuf, cause: io::Error },
    /// The operating system refuses to write.
    #[error("cannot write {}: {cause}{}", path.display(), advice(Access::Write, cause))]
    Write { path: PathBuf, cause: io::Error },
    /// A document cannot be read.
    #[error("{location}: {what}")]
    Document { location: Location, what: String },
    /// The tokenizer cannot be loaded, made or saved.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// The options contradict each other.
    #[error("{0}")]
    Options(String),
    /// The output cannot be written.
    #[error(transparent)]
    Indexed(#[from] IndexedError),
}

/// What makes a data set of a corpus.
pub type Result<T, E = PreprocessError> = std::result::Result<T, E>;
