//! `burn-megatron preprocess`

use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use indicatif::{HumanCount, HumanDuration, ProgressBar, ProgressStyle};

use super::print;
use crate::console::warn;
use crate::data::chat::{ChatPreprocess, ChatPreprocessReport, preprocess_chat};
use crate::data::indexed::Dtype;
use crate::data::preprocess::{
    PreprocessOptions, PreprocessReport, Progress, Sentences, Stage, TextDocuments, TokenizerChoice, prepare,
};

/// Arguments of `preprocess`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Text (.txt and others), JSON lines (.jsonl, .json) or Parquet (.parquet); a .json file may also be one array of documents
    #[arg(long, required = true, num_args = 1.., value_name = "FILE")]
    input: Vec<PathBuf>,
    /// Outputs are PREFIX_KEY_document.bin and .idx, with --split-sentences PREFIX_KEY_sentence
    #[arg(long, value_name = "PREFIX", required_unless_present = "chat")]
    output_prefix: Option<PathBuf>,
    /// The input are conversations: write one JSON object each (text, input_ids, assistant_masks), rendered with the
    /// chat template of --tokenizer
    #[arg(long, requires_all = ["tokenizer", "output"])]
    chat: bool,
    /// With --chat: the JSON lines to write
    #[arg(long, value_name = "FILE", requires = "chat", conflicts_with = "output_prefix")]
    output: Option<PathBuf>,
    /// With --chat: a Jinja template in place of the tokenizer's own
    #[arg(long, value_name = "FILE", requires = "chat")]
    chat_template: Option<PathBuf>,
    /// With --chat: leave out and count rows that cannot be used, instead of stopping at the first
    #[arg(long, requires = "chat")]
    skip_bad_rows: bool,
    /// Keys of the JSON documents; each becomes an output. Arrays of integers are taken as token ids, with --split-sentences
    /// arrays of texts as sentences
    #[arg(long, num_args = 1.., value_name = "KEY", default_value = "text")]
    json_keys: Vec<String>,
    /// A tokenizer.json, SentencePiece model, tiktoken ranks or vocab.txt of a BERT, or 'char' (the characters of the input) or 'byte', saved as PREFIX_tokenizer.json; with --chat
    /// its folder
    #[arg(long, alias = "tokenizer-model", value_name = "FILE", conflicts_with = "train_tokenizer")]
    tokenizer: Option<PathBuf>,
    /// Train a byte-level BPE of so many entries on the input, 257 to 1048576; saved as PREFIX_tokenizer.json
    #[arg(long, value_name = "VOCAB", value_parser = entries)]
    train_tokenizer: Option<usize>,
    /// Train a WordPiece vocabulary of at most so many entries on the input, lower-case and with BERT's special tokens, 7 to
    /// 1048576; saved as PREFIX_tokenizer.json
    #[arg(long, value_name = "VOCAB", value_parser = entries, conflicts_with_all = ["tokenizer", "train_tokenizer"])]
    train_wordpiece: Option<usize>,
    /// End each document with the end-of-document token
    #[arg(long)]
    append_eod: bool,
    /// The end-of-document token, if it is not one of the usual ones
    #[arg(long, value_name = "TOKEN", requires = "append_eod")]
    eod_token: Option<String>,
    /// Id of the end-of-document token, for documents that are token ids
    #[arg(long, value_name = "ID", conflicts_with = "eod_token", requires = "append_eod")]
    eod_id: Option<i64>,
    /// Size of the vocabulary, for documents that are token ids; ids outside are refused
    #[arg(long, value_name = "N", conflicts_with_all = ["tokenizer", "train_tokenizer", "train_wordpiece"])]
    vocab_size: Option<usize>,
    /// Element type; by default uint16 if the vocabulary has less than 65500 entries, else int32
    #[arg(long, value_name = "TYPE")]
    dtype: Option<Dtype>,
    /// What a document is in a text file
    #[arg(long, value_enum, default_value = "paragraph", value_name = "WHAT")]
    text_documents: TextDocuments,
    /// Make each sentence of a document a sequence, for BERT and T5: 'unicode' (by Unicode's rules, without ends at English
    /// abbreviations and single line breaks) or 'lines' (a sentence each)
    #[arg(long, value_enum, value_name = "HOW", num_args = 0..=1, default_missing_value = "unicode")]
    split_sentences: Option<Sentences>,
    /// With --split-sentences: keep the white space behind a sentence, line breaks too
    #[arg(long, requires = "split_sentences")]
    keep_newlines: bool,
    /// Threads that tokenize, at most 1024; by default all cores
    #[arg(long, value_name = "N")]
    workers: Option<usize>,
    /// Leave out and count documents that cannot be read, instead of stopping at the first
    #[arg(long)]
    skip_bad_lines: bool,
}

fn entries(text: &str) -> Result<usize, String> {
    text.parse()
        .map_err(|_| "expected a number of entries, such as 1024; --tokenizer takes files, char and byte".into())
}

impl Args {
    fn options(self, output_prefix: PathBuf) -> PreprocessOptions {
        let tokenizer = match (self.tokenizer, self.train_tokenizer, self.train_wordpiece) {
            (_, Some(size), _) => TokenizerChoice::TrainBpe(size),
            (.., Some(size)) => TokenizerChoice::TrainWordPiece(size),
            (Some(name), ..) if name.as_os_str() == "char" => TokenizerChoice::Characters,
            (Some(name), ..) if name.as_os_str() == "byte" => TokenizerChoice::Bytes,
            (Some(path), ..) => TokenizerChoice::File(path),
            (None, None, None) => TokenizerChoice::None,
        };
        let mut options = PreprocessOptions::new(self.input, output_prefix, tokenizer);
        options.json_keys = self.json_keys;
        options.append_eod = self.append_eod;
        options.eod_token = self.eod_token;
        options.eod_id = self.eod_id;
        options.vocab_size = self.vocab_size;
        options.dtype = self.dtype;
        options.text_documents = self.text_documents;
        options.split_sentences = self.split_sentences;
        options.keep_newlines = self.keep_newlines;
        options.workers = self.workers.unwrap_or(options.workers);
        options.skip_bad_lines = self.skip_bad_lines;
        options
    }
}

/// Runs `preprocess` and says what it wrote.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let Some(output_prefix) = args.output_prefix.clone() else { return chat(args) };
    let (mut display, split) = (Display::new(), args.split_sentences.is_some());
    let report = prepare(&args.options(output_prefix), &mut |progress| display.show(progress));
    display.clear();
    print(&describe(&report?, split))?;
    Ok(ExitCode::SUCCESS)
}

/// Conversations to samples.
fn chat(args: Args) -> anyhow::Result<ExitCode> {
    let (Some(tokenizer), Some(output)) = (args.tokenizer, args.output) else {
        anyhow::bail!("--chat needs --tokenizer and --output");
    };
    let template = args.chat_template;
    let inputs: Vec<_> = args.input.iter().chain([&tokenizer]).chain(&template).collect();
    super::is_no_input("--output", &output, &inputs)?;
    let options = ChatPreprocess { inputs: args.input, tokenizer, template, output, skip_bad_rows: args.skip_bad_rows };
    let report = preprocess_chat(&options)?;
    print(&describe_chat(&options, &report))?;
    Ok(ExitCode::SUCCESS)
}

fn describe_chat(options: &ChatPreprocess, report: &ChatPreprocessReport) -> String {
    let mut text = format!(
        "{}: {} samples, {} tokens, {} of them of assistants\n",
        options.output.display(),
        HumanCount(report.samples),
        HumanCount(report.tokens),
        HumanCount(report.assistant_tokens)
    );
    if let Some(first) = &report.skipped.first {
        text += &format!(
            "left out {} rows that cannot be used; the first: {first}\n",
            HumanCount(report.skipped.rows as u64)
        );
    }
    text
}

fn describe(report: &PreprocessReport, split: bool) -> String {
    let mut text = String::new();
    for output in &report.outputs {
        let summary = &output.summary;
        let sentences = format!("{} sentences, ", HumanCount(summary.sequences as u64));
        text += &format!(
            "{}.bin: {} documents, {}{} tokens, {} bytes of {}\n",
            output.prefix.display(),
            HumanCount(summary.documents as u64),
            if split { &sentences } else { "" },
            HumanCount(summary.tokens as u64),
            HumanCount(summary.bytes as u64),
            report.dtype,
        );
    }
    if let (Some(tokenizer), Some(size)) = (&report.tokenizer, report.vocab_size) {
        let eod = report.eod_id.map_or(String::new(), |id| format!(", end of document {id}"));
        text += &format!("{}: vocabulary {}{eod}\n", tokenizer.display(), HumanCount(size as u64));
    }
    if let Some(first) = &report.first_skipped {
        let skipped = HumanCount(report.skipped);
        text += &format!("left out {skipped} documents that cannot be read; the first: {first}\n");
    }
    let seconds = report.seconds.max(1e-9);
    let documents = HumanCount((report.documents as f64 / seconds) as u64);
    let megabytes = report.bytes as f64 / seconds / 1e6;
    text + &format!("tokenized in {seconds:.2} s: {documents} documents/s, {megabytes:.2} MB/s\n")
}

/// A bar on a terminal, a line every few seconds elsewhere.
pub(super) struct Display {
    bar: Option<ProgressBar>,
    stage: Stage,
    started: Instant,
    last_line: Instant,
}

const LINE_EVERY: Duration = Duration::from_secs(5);

impl Display {
    pub fn new() -> Self {
        let bar = io::stderr().is_terminal().then(|| {
            let style = "{bar:20} {percent:>3} % {wide_msg}";
            ProgressBar::new(1).with_style(ProgressStyle::with_template(style).expect("a valid template"))
        });
        Self { bar, stage: Stage::Tokenizer, started: Instant::now(), last_line: Instant::now() }
    }

    pub fn show(&mut self, progress: Progress) {
        if progress.stage != self.stage {
            (self.stage, self.started) = (progress.stage, Instant::now());
        }
        let text = describe_progress(progress, self.started.elapsed().as_secs_f64());
        match &self.bar {
            Some(bar) => {
                bar.set_length(progress.total_bytes);
                bar.set_position(progress.bytes);
                bar.set_message(text);
            }
            None if self.last_line.elapsed() >= LINE_EVERY => {
                self.last_line = Instant::now();
                warn(text);
            }
            None => {}
        }
    }

    pub fn clear(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn describe_progress(progress: Progress, seconds: f64) -> String {
    let what = match progress.stage {
        Stage::Tokenizer => "tokenizer",
        Stage::Tokens => "tokens",
    };
    if progress.bytes == 0 {
        return format!("{what}: reading");
    }
    let left = progress.total_bytes.saturating_sub(progress.bytes) as f64 * seconds / progress.bytes as f64;
    format!(
        "{what}: {} documents, {} documents/s, {} left",
        HumanCount(progress.documents),
        HumanCount((progress.documents as f64 / seconds.max(1e-3)) as u64),
        HumanDuration(Duration::from_secs_f64(left)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_and_time_left_follow_from_the_bytes() {
        let progress = Progress { stage: Stage::Tokens, bytes: 250, total_bytes: 1000, documents: 5000 };
        assert_eq!(describe_progress(progress, 10.0), "tokens: 5,000 documents, 500 documents/s, 30 seconds left");
        assert_eq!(describe_progress(Progress { bytes: 0, documents: 0, ..progress }, 0.0), "tokens: reading");
    }
}
