//! What conversations and pairs of answers have in common as the data of a run.

use std::path::PathBuf;

use indicatif::HumanCount;

use super::TrainError;
use super::run_data::fits;
use crate::config::RunConfig;
use crate::data::chat::{ChatReport, ChatTokenizer};
use crate::data::preprocess::vocab_size;

/// The tokenizer with the chat template of the run, if they can be used with the model, and its file. The error says
/// why not.
pub(super) fn tokenizer(config: &RunConfig) -> Result<(PathBuf, ChatTokenizer), TrainError> {
    let path = PathBuf::from(config.data.tokenizer.as_deref().unwrap_or_default());
    let template = if config.chat.is_used() { &config.chat.template } else { &config.preference.template };
    let tokenizer = ChatTokenizer::open(&path, template.as_deref())?;
    fits(config, vocab_size(tokenizer.tokenizer()), Some(&path))?;
    Ok((path, tokenizer))
}

/// What rows become.
pub(super) struct Rows {
    /// Their name.
    pub what: &'static str,
    /// Where the tokens are that count.
    pub learned: &'static str,
}

/// What became of the rows of a part of the data, in a line; `packed` into so many sequences with this share of padding.
pub(super) fn describe(part: &str, rows: &Rows, packed: (usize, f64), report: &ChatReport) -> String {
    let (count, Rows { what, learned }) = (|number: usize| HumanCount(number as u64), rows);
    let mut line = format!(
        "{part}: {} {what} in {} sequences, {} tokens {learned}, {:.1} % padding",
        count(report.samples),
        count(packed.0),
        count(report.learned),
        100.0 * packed.1
    );
    for (number, became) in [(report.truncated, "truncated"), (report.dropped, "dropped as too long")] {
        if number > 0 {
            line += &format!("; {} {what} {became}", count(number));
        }
    }
    if let Some(first) = &report.skipped.first {
        line += &format!("; {} bad rows left out, the first: {first}", HumanCount(report.skipped.rows as u64));
    }
    line
}
