//! Files of conversations to samples.

use std::io::{BufWriter, Write};
use std::path::PathBuf;

use rayon::prelude::*;
use serde::Serialize;

use super::encode::{ChatSample, ChatTokenizer};
use super::error::{ChatError, Result};
use super::lines::{Row, rows};
use crate::partial_file::partial;

/// Rows that are encoded at a time.
const AT_A_TIME: usize = 1024;

/// What [`preprocess_chat`] reads and writes.
#[derive(Clone, Debug)]
pub struct ChatPreprocess {
    /// Files of rows, in order.
    pub inputs: Vec<PathBuf>,
    /// Folder with a `tokenizer.json`, or that file.
    pub tokenizer: PathBuf,
    /// A template in place of the tokenizer's own.
    pub template: Option<PathBuf>,
    /// A JSON object per sample: `text`, `input_ids`, `assistant_masks`.
    pub output: PathBuf,
    /// Whether rows that cannot be used are left out and counted.
    pub skip_bad_rows: bool,
}

/// What [`preprocess_chat`] wrote.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChatPreprocessReport {
    /// Samples written.
    pub samples: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Those of assistants.
    pub assistant_tokens: u64,
    /// Rows that were left out.
    pub skipped: Skipped,
}

/// Rows that were left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Skipped {
    /// How many.
    pub rows: usize,
    /// What was wrong with the first.
    pub first: Option<String>,
}

impl Skipped {
    /// Leaves out a row that cannot be used. Fails with what is wrong with it unless `skip`; `flag` is what asks for that.
    pub(in crate::data) fn leave_out(&mut self, row: &Row, what: String, (skip, flag): (bool, &str)) -> Result<()> {
        if !skip {
            return Err(row.refused(format!("{what} ({flag}: leave such rows out)")));
        }
        self.rows += 1;
        self.first.get_or_insert_with(|| row.refused(what).to_string());
        Ok(())
    }

    /// The first one as the end of a message.
    pub(in crate::data) fn named(&self) -> String {
        self.first.as_ref().map_or(String::new(), |first| format!("; the first: {first}"))
    }
}

#[derive(Serialize)]
struct Line<'a> {
    text: &'a str,
    input_ids: &'a [u32],
    assistant_masks: Vec<u8>,
}

/// Writes one JSON object per conversation. The output is complete or not there.
pub fn preprocess_chat(options: &ChatPreprocess) -> Result<ChatPreprocessReport> {
    let tokenizer = ChatTokenizer::open(&options.tokenizer, options.template.as_deref())?;
    let output = &options.output;
    let write = |cause| ChatError::Write { path: output.clone(), cause };
    let file = partial(output).map_err(write)?;
    let mut out = BufWriter::with_capacity(1 << 20, file.as_file());
    let mut report = ChatPreprocessReport::default();
    report.skipped = encode_all(&tokenizer, &options.inputs, options.skip_bad_rows, |_, sample| {
        let assistant_masks: Vec<u8> = sample.mask.iter().map(|counts| u8::from(*counts)).collect();
        report.samples += 1;
        report.tokens += sample.ids.len() as u64;
        report.assistant_tokens += assistant_masks.iter().map(|counts| u64::from(*counts)).sum::<u64>();
        let line = Line { text: &sample.text, input_ids: &sample.ids, assistant_masks };
        serde_json::to_writer(&mut out, &line).map_err(|error| write(error.into()))?;
        out.write_all(b"\n").map_err(write)
    })?;
    if report.samples == 0 && report.skipped.rows == 0 {
        let files = options.inputs.iter().map(|file| file.display().to_string()).collect::<Vec<_>>().join(", ");
        return Err(ChatError::Nothing { what: format!("there is no conversation in {files}; name files with rows") });
    }
    out.flush().map_err(write)?;
    drop(out);
    file.as_file().sync_all().map_err(write)?;
    file.persist(output).map_err(|error| write(error.error))?;
    Ok(report)
}

/// Encodes the rows of files in order and hands them to `each`. With `skip`, rows that cannot be used are left out.
/// Fails if files cannot be read, and without `skip` the first row that cannot be used.
pub(super) fn encode_all(
    tokenizer: &ChatTokenizer,
    files: &[PathBuf],
    skip: bool,
    mut each: impl FnMut(&Row, ChatSample) -> Result<()>,
) -> Result<Skipped> {
    let mut skipped = Skipped::default();
    for file in files {
        let mut rows = rows(file)?.peekable();
        while rows.peek().is_some() {
            let some: Vec<Row> = rows.by_ref().take(AT_A_TIME).collect::<Result<_, _>>()?;
            let encode = |row: &Row| row.conversation().and_then(|conversation| tokenizer.encode(&conversation));
            let encoded: Vec<Result<ChatSample, String>> = some.par_iter().map(encode).collect();
            for (row, sample) in some.iter().zip(encoded) {
                match sample {
                    Ok(sample) => each(row, sample)?,
                    Err(what) => {
                        skipped.leave_out(row, what, (skip, "--skip-bad-rows, chat.skip-bad-rows"))?;
                    }
                }
            }
        }
    }
    Ok(skipped)
}
