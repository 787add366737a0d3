//! One JSON line per step in the run's directory, for notebooks and plotting tools.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::stats::{EvalStats, LoadStats, SaveStats, StepStats};

/// Appends lines like `{"kind":"train",…}` to a file; the other kinds are `valid`, `checkpoint` and `resumed`.
///
/// A line is written whole and at once, so a run that is killed leaves only complete lines.
pub struct StepsLog {
    path: PathBuf,
    file: File,
}

#[derive(Serialize)]
struct TrainLine<'a> {
    kind: &'static str,
    #[serde(flatten)]
    stats: &'a StepStats,
    tokens_per_second: f64,
}

#[derive(Serialize)]
struct ValidLine<'a> {
    kind: &'static str,
    step: u64,
    #[serde(flatten)]
    stats: &'a EvalStats,
}

#[derive(Serialize)]
struct PlainLine<T> {
    kind: &'static str,
    #[serde(flatten)]
    stats: T,
}

impl StepsLog {
    /// Opens `directory/steps.jsonl` for appending and creates the directory if it is missing.
    ///
    /// # Errors
    /// The path and the cause when the directory or file cannot be made.
    pub fn open(directory: &Path) -> io::Result<Self> {
        let path = directory.join("steps.jsonl");
        let in_context = |err: io::Error| io::Error::new(err.kind(), format!("{}: {err}", path.display()));
        std::fs::create_dir_all(directory).map_err(in_context)?;
        let file = OpenOptions::new().create(true).append(true).open(&path).map_err(in_context)?;
        Ok(Self { path, file })
    }

    /// Where the lines go.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a training step.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn train(&mut self, stats: &StepStats) -> io::Result<()> {
        self.line(&TrainLine { kind: "train", stats, tokens_per_second: stats.tokens_per_second() })
    }

    /// Writes the validation result after `step`.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn valid(&mut self, step: u64, stats: &EvalStats) -> io::Result<()> {
        self.line(&ValidLine { kind: "valid", step, stats })
    }

    /// Writes that a checkpoint is complete.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn saved(&mut self, stats: &SaveStats) -> io::Result<()> {
        self.line(&PlainLine { kind: "checkpoint", stats })
    }

    /// Writes that the run goes on from a checkpoint.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn resumed(&mut self, stats: &LoadStats) -> io::Result<()> {
        self.line(&PlainLine { kind: "resumed", stats })
    }

    fn line(&mut self, line: &impl Serialize) -> io::Result<()> {
        let mut text = serde_json::to_vec(line)?;
        text.push(b'\n');
        self.file.write_all(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_json_and_a_second_run_appends() {
        let directory = tempfile::tempdir().unwrap();
        let saved = SaveStats { step: 2, bytes: 1000, stall: 0.5, seconds: 2.0 };
        let stats = StepStats {
            step: 3,
            loss: 2.5,
            tokens: 128,
            grad_norm: 0.5,
            lr: 1e-3,
            seconds: 0.25,
            memory: 1024,
            saved: Some(saved),
        };
        StepsLog::open(directory.path()).unwrap().train(&stats).unwrap();
        let mut log = StepsLog::open(directory.path()).unwrap();
        log.valid(3, &EvalStats { loss: 2.25, tokens: 64 }).unwrap();
        log.saved(&saved).unwrap();
        let text = std::fs::read_to_string(log.path()).unwrap();
        let lines: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 3);
        assert_eq!((&lines[2]["kind"], &lines[2]["stall"]), (&"checkpoint".into(), &0.5.into()));
        assert_eq!(lines[0]["tokens_per_second"], 512.0);
        assert_eq!(lines[0]["grad_norm"], 0.5);
        assert_eq!((&lines[1]["kind"], &lines[1]["step"]), (&"valid".into(), &3.into()));
    }

    #[test]
    fn an_impossible_directory_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = StepsLog::open(&file.path().join("run")).err().unwrap().to_string();
        assert!(error.contains("steps.jsonl"), "{error}");
    }
}
