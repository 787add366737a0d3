//! The `burn-megatron` command: one module per subcommand, each with its arguments and a `run`.

mod bench;
mod calibration;
mod chat;
pub mod device;
mod doctor;
mod eval;
mod export;
mod fetch;
mod foreign;
mod forward;
mod generate;
mod hints;
mod host;
mod import;
mod inspect;
pub mod layout;
mod merge;
mod overrides;
mod plan;
mod preprocess;
mod processes;
mod prune;
mod quantise;
mod reference;
mod replay;
mod sampling;
#[cfg(feature = "serve")]
mod serve;
mod train;
mod train_module;
mod verify;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use backend_dist::process::Cluster;
use clap::{Parser, Subcommand};
pub use foreign::parse;
use models::{FamilyConfig, ModelConfig};
use processes::together;

use crate::checkpoint::Checkpoint;
use crate::console::{unwritten, warn};
use crate::data::readable_tokenizer;
use crate::hf::{HfFolder, HfFolderError};
use crate::plan::thousands;
use crate::refusal::{Access, advice};
use crate::train::ModuleRun;

/// Megatron-LM in Rust on Burn.
#[derive(Debug, Parser)]
#[command(name = "burn-megatron", version, about, max_term_width = 120)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Tokenize .txt, .jsonl and .parquet files into Megatron's .bin/.idx files
    Preprocess(preprocess::Args),
    /// Show the samples of .bin/.idx files, or the contents of a checkpoint
    Inspect(inspect::Args),
    /// Predict memory, step time and the best layouts of a run, or simulate a pipeline schedule
    Plan(Box<plan::Args>),
    /// Train a model as a TOML file describes it
    Train(Box<train::Args>),
    /// Measure training speed: tokens/s, TFLOP/s, MFU, memory and idle time, in one table
    Bench(Box<bench::Args>),
    /// Generate text with a trained model
    Generate(Box<generate::Args>),
    /// Talk to a Hugging Face folder in the terminal
    Chat(Box<chat::Args>),
    /// Serve a Hugging Face folder over HTTP, with OpenAI's completion and chat endpoints
    #[cfg(feature = "serve")]
    Serve(Box<serve::Args>),
    /// Evaluate a Hugging Face folder: multiple choice, log-likelihoods, perplexity, exact match
    Eval(Box<eval::Args>),
    /// Check that parallel layouts train like a single device, in double precision
    Verify(verify::Args),
    /// Repeat a recorded Megatron-Core run and compare every step with it
    Replay(replay::Args),
    /// Convert a Hugging Face folder, or weights of PyTorch DCP or Megatron-Core, to a checkpoint
    Import(import::Args),
    /// Convert a checkpoint to a Hugging Face folder, also in few bits, or to PyTorch DCP or Megatron-Core's torch_dist
    Export(export::Args),
    /// Bring a checkpoint from where a run's copies are (checkpoint.storage)
    Fetch(fetch::Args),
    /// Add adapters to the weights of a Hugging Face folder
    Merge(merge::Args),
    /// Write a smaller model from the most important weights of a Hugging Face folder
    Prune(prune::Args),
    /// Check driver, GPUs, libraries and disk of this machine
    Doctor(doctor::Args),
    /// Compute logits, loss and gradients of a Hugging Face folder, in any layout
    Forward(forward::Args),
    /// Write the reference pages of configuration keys and commands
    #[command(hide = true)]
    Reference(reference::Args),
}

/// Runs a parsed command.
///
/// # Errors
/// Whatever the command fails with; the chain of causes says where.
pub fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    let prints = cli.command.only_prints();
    let code = answer(cli.command)?;
    match unwritten().filter(|_| prints && code == ExitCode::SUCCESS) {
        Some(error) => Err(anyhow::anyhow!("{STDOUT}: {error}")),
        None => Ok(code),
    }
}

impl Command {
    /// Whether what it prints line by line is all of its result.
    fn only_prints(&self) -> bool {
        match self {
            Self::Train(args) => args.is_dry_run(),
            Self::Verify(_) | Self::Replay(_) | Self::Bench(_) | Self::Doctor(_) => true,
            _ => false,
        }
    }
}

fn answer(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Preprocess(args) => preprocess::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Plan(args) => plan::run(*args),
        Command::Train(args) => train::run(*args),
        Command::Bench(args) => together(args.device.kind(), |cluster| bench::run(*args, cluster)),
        Command::Generate(args) => together(args.device, |cluster| generate::run(*args, cluster)),
        Command::Chat(args) => chat::run(*args),
        #[cfg(feature = "serve")]
        Command::Serve(args) => serve::run(*args),
        Command::Eval(args) => together(args.device, |cluster| eval::run(*args, cluster)),
        Command::Verify(args) => together(args.device, |cluster| verify::run(args, cluster)),
        Command::Replay(args) => together(args.device, |cluster| replay::run(args, cluster)),
        Command::Import(args) => import::run(args),
        Command::Export(args) => export::run(args),
        Command::Fetch(args) => fetch::run(args),
        Command::Merge(args) => merge::run(args),
        Command::Prune(args) => prune::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Forward(args) => together(args.device, |cluster| forward::run(args, cluster)),
        Command::Reference(args) => reference::run(args),
    }
}

/// An error and its causes in one line. A cause that the text before it contains already is not repeated. Control
/// characters, which may come from a file, are written as escapes: a terminal would obey them.
pub fn describe(error: &anyhow::Error) -> String {
    let text = error.chain().map(ToString::to_string).fold(String::new(), |text, cause| match text.as_str() {
        "" => cause,
        text if text.contains(&cause) => text.into(),
        text => format!("{text}: {cause}"),
    });
    let shown = |character: char| match character {
        '\n' | '\t' => character.to_string(),
        control if control.is_control() => control.escape_default().to_string(),
        other => other.to_string(),
    };
    text.chars().map(shown).collect()
}

/// What could not be done where standard output refuses.
const STDOUT: &str = "cannot write to standard output";

/// Prints a result. A reader that closes the pipe (`| head`) is no failure.
fn print(text: &str) -> anyhow::Result<()> {
    match write_now(text) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(anyhow::anyhow!("{STDOUT}: {error}")),
        _ => Ok(()),
    }
}

/// To standard output, at once.
fn write_now(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// A checkpoint of the engine, or the latest in a folder. Fails if there is none; of a plain Burn module's run with what to do.
fn open_checkpoint(path: &Path) -> anyhow::Result<Checkpoint> {
    if let Some(run) = ModuleRun::find(path)? {
        let (kind, path) = (run.config.model.model_type(), path.display());
        anyhow::bail!(
            "{path} is of a {kind}, a plain Burn module: `burn-megatron export --checkpoint {path} --hf DIR` writes its model, \
             and --hf takes the result"
        );
    }
    Ok(Checkpoint::open(path)?)
}

/// Opens a folder, and the first process says what of it is not read.
fn open_folder(folder: &Path, cluster: Option<&Cluster>) -> Result<HfFolder, HfFolderError> {
    let opened = HfFolder::open(folder)?;
    say_left_out(&opened, cluster);
    Ok(opened)
}

fn say_left_out(folder: &HfFolder, cluster: Option<&Cluster>) {
    if let Some(what) = folder.left_out().filter(|_| cluster.is_none_or(Cluster::is_first)) {
        warn(format_args!("note: {what}"));
    }
}

/// Says what takes minutes of a large model, before it begins.
fn say_reading(folder: &Path, config: &FamilyConfig) {
    let parameters = thousands(config.parameter_count() as f64);
    warn(format_args!("reading the weights of {}, {parameters} parameters", folder.display()));
}

/// The tokenizer of a folder that is written again with the model, unless it is in a form that is not read, which is said.
fn tokenizer_to_copy(folder: &Path) -> Option<PathBuf> {
    readable_tokenizer(folder).unwrap_or_else(|error| {
        warn(format_args!("the tokenizer is left out: {error}"));
        None
    })
}

/// How files of models and tokenizers begin in a folder.
const OF_MODELS: [&str; 10] = [
    "adapter_",
    "chat_template",
    "config.json",
    "generation_config",
    "merges.",
    "model-0",
    "model.safetensors",
    "special_tokens",
    "tokenizer",
    "vocab.",
];

/// Refuses to write what `flag` names over a file that is read: one of `inputs`, or a model's or tokenizer's file in a folder
/// of them.
fn is_no_input(flag: &str, output: &Path, inputs: &[impl AsRef<Path>]) -> anyhow::Result<()> {
    let Ok(there) = output.canonicalize() else { return Ok(()) };
    // A file may be a link out of its folder.
    let folder = output.parent().map(|folder| if folder.as_os_str().is_empty() { Path::new(".") } else { folder });
    let folder = folder.and_then(|folder| folder.canonicalize().ok());
    let name = output.file_name().unwrap_or_default().to_string_lossy();
    let is_of_model = OF_MODELS.iter().any(|start| name.starts_with(start));
    let is_read = |input: PathBuf| input == there || is_of_model && Some(input) == folder;
    match inputs.iter().filter_map(|input| input.as_ref().canonicalize().ok()).any(is_read) {
        true => anyhow::bail!("{flag} {} is an input, which would be lost; name another file", output.display()),
        false => Ok(()),
    }
}

/// The error of a file that the system refuses, with what to do.
fn refused(access: Access, path: &Path) -> impl FnOnce(io::Error) -> anyhow::Error {
    let what = match access {
        Access::Read => format!("cannot read {}", path.display()),
        Access::Write => format!("cannot write {}", path.display()),
    };
    move |cause| anyhow::anyhow!("{what}: {cause}{}", advice(access, &cause))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_told_once() {
        let cause = || io::Error::other("no such file");
        let told = anyhow::Error::new(cause()).context("cannot read a.json: no such file").context("--hf");
        assert_eq!(describe(&told), "--hf: cannot read a.json: no such file");
        assert_eq!(describe(&anyhow::Error::new(cause()).context("a.json")), "a.json: no such file");
    }

    #[test]
    fn escapes_of_a_file_do_not_reach_the_terminal() {
        let told = describe(&anyhow::anyhow!("key \u{1b}[31mred\u{7}\n\tnext line, naïve"));
        assert_eq!(told, "key \\u{1b}[31mred\\u{7}\n\tnext line, naïve");
    }
}
