//! The `burn-megatron` command: one module per subcommand, each with its arguments and a `run`.

mod bench;
pub mod device;
mod doctor;
mod export;
mod foreign;
mod forward;
mod generate;
mod hints;
mod import;
mod inspect;
pub mod layout;
mod overrides;
mod plan;
mod preprocess;
mod processes;
mod replay;
mod train;
mod verify;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
pub use foreign::parse;

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
    /// Turn .txt and .jsonl files into Megatron's .bin/.idx
    Preprocess(preprocess::Args),
    /// Show what a model will see of .bin/.idx files, or what a checkpoint holds
    Inspect(inspect::Args),
    /// Show what a run needs before it starts: memory, time, the best layouts; or what a pipeline schedule costs
    Plan(Box<plan::Args>),
    /// Train a model as one TOML file describes it
    Train(Box<train::Args>),
    /// Measure how fast a run trains: tokens/s, TFLOP/s, MFU, memory, idle time, in one table
    Bench(Box<bench::Args>),
    /// Continue a text with a trained model
    Generate(Box<generate::Args>),
    /// Train in many layouts in double precision and compare each with one device
    Verify(verify::Args),
    /// Repeat a recorded Megatron-Core run and compare every step
    Replay(replay::Args),
    /// Turn a Hugging Face folder into a checkpoint
    Import(import::Args),
    /// Turn a checkpoint into a Hugging Face folder
    Export(export::Args),
    /// Say what this machine can run, and what is missing for runs on GPUs
    Doctor(doctor::Args),
    /// Compute logits, loss and gradients of a Hugging Face folder, in any layout
    Forward(forward::Args),
}

/// Runs a parsed command.
///
/// # Errors
/// Whatever the command fails with; the chain of causes says where.
pub fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    match cli.command {
        Command::Preprocess(args) => preprocess::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Plan(args) => plan::run(*args),
        Command::Train(args) => train::run(*args),
        Command::Bench(args) => bench::run(*args),
        Command::Generate(args) => generate::run(*args),
        Command::Verify(args) => verify::run(args),
        Command::Replay(args) => replay::run(args),
        Command::Import(args) => import::run(args),
        Command::Export(args) => export::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Forward(args) => forward::run(args),
    }
}

/// An error and its causes in one line; a cause that the text before it has told already is not told again.
pub fn describe(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |text, cause| match text.as_str() {
        "" => cause,
        text if text.ends_with(&cause) => text.into(),
        text => format!("{text}: {cause}"),
    })
}

/// Prints a result. A reader that has seen enough (`| head`) is no failure.
fn print(text: &str) -> io::Result<()> {
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
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
}
