//! `serve` of a file: its requests are answered, each by the model or adapter that it names, and nothing listens.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Result, anyhow, bail};

use crate::cli::{is_no_input, refused};
use crate::data::read_text;
use crate::refusal::{Access, advice};
use crate::serve::http::{App, BatchRequest, answer_batch, batch_requests};

/// A file in place of clients.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Batch")]
pub(super) struct BatchArgs {
    /// Listen to nobody: answer the requests of a file, one JSON object per line with `custom_id`, `url` and `body` (OpenAI's
    /// batch API, vLLM's run-batch); `model` in the body names the model or an adapter
    #[arg(long, short = 'i', value_name = "FILE", requires = "output_file", conflicts_with = "requests")]
    input_file: Option<PathBuf>,
    /// File of the answers, a line for each request, in the same order
    #[arg(long, short = 'o', value_name = "FILE", requires = "input_file")]
    output_file: Option<PathBuf>,
}

/// Requests that were read, and where their answers go.
pub(super) struct Batch {
    input: PathBuf,
    requests: Vec<BatchRequest>,
    output: PathBuf,
    /// Opened already if something was there: a pipe is opened once.
    file: Option<File>,
}

impl BatchArgs {
    /// The batch, if there is one, for the model of a folder. Fails if a file cannot be used, or a line is no request; before
    /// weights are read.
    pub fn open(&self, model: Option<&Path>) -> Result<Option<Batch>> {
        let (Some(input), Some(output)) = (self.input_file.clone(), self.output_file.clone()) else { return Ok(None) };
        let text = read_text(&input).map_err(refused(Access::Read, &input))?;
        let requests = batch_requests(&text).map_err(|(line, why)| anyhow!("{}:{line}: {why}", input.display()))?;
        if requests.is_empty() {
            bail!("{}: it has no requests", input.display());
        }
        let inputs: Vec<&Path> = [input.as_path()].into_iter().chain(model).collect();
        is_no_input("--output-file", &output, &inputs)?;
        // What an earlier batch has written stays until this one has a model, and where nothing was nothing is left.
        let is_new = !output.exists();
        let file = File::options().write(true).create(true).truncate(false).open(&output);
        let file = file.map_err(refused(Access::Write, &output))?;
        let file = if is_new { fs::remove_file(&output).map(|()| None) } else { Ok(Some(file)) };
        let file = file.map_err(refused(Access::Write, &output))?;
        Ok(Some(Batch { input, requests, output, file }))
    }
}

impl Batch {
    /// Answers the requests, so many at a time, and says how many were.
    pub fn answer(self, app: &Arc<App>, at_once: usize) -> Result<String> {
        let Self { input, requests, output, file } = self;
        let begin = || match file {
            // Nothing else can be truncated: a pipe, or /dev/null.
            Some(file) if file.metadata()?.is_file() => file.set_len(0).map(|()| file),
            Some(file) => Ok(file),
            None => File::create(&output),
        };
        let file = begin().map_err(refused(Access::Write, &output))?;
        let (all, mut out) = (requests.len(), BufWriter::new(file));
        let answered = answer_batch(app, requests, at_once, |line| writeln!(out, "{line}").and_then(|()| out.flush()));
        let failed =
            answered.map_err(|error| anyhow!("{}: {error}{}", output.display(), advice(Access::Write, &error)))?;
        if failed > 0 {
            bail!("{failed} of {all} requests of {} have no answer: {} says why", input.display(), output.display());
        }
        Ok(format!("{}: {all} {}\n", output.display(), if all == 1 { "answer" } else { "answers" }))
    }
}
