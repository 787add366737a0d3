//! Texts that a model reads before it becomes a smaller one, and its perplexity before and after.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use backend_dist::mesh::ParallelLayout;
use burn::tensor::Device;
use models::{FamilyConfig, ModelConfig, WeightSource};

use super::device::DeviceKind;
use super::eval::causal_length;
use super::forward::Precision;
use crate::calibrate::Calibration;
use crate::eval::{Encoder, EvalError, EvalSettings, ExactMatch, Limits, Task, Work, compute, read_documents, results};
use crate::forward::Settings;
use crate::hf::HfFolder;

/// Longer sequences show of the layers' inputs what shorter ones do, and take more memory.
const LONGEST: usize = 2048;

/// Arguments about texts that a model reads.
#[derive(Debug, clap::Args)]
pub(super) struct CalibrationArgs {
    /// Texts, or JSON lines with `text`, that show what the layers' inputs are like
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub calibration: Vec<PathBuf>,
    /// Most sequences of the calibration texts
    #[arg(long, value_name = "N", default_value_t = 128)]
    calibration_samples: usize,
    /// Texts, or JSON lines with `text`, whose perplexity before and after is wanted
    #[arg(long, value_name = "FILE", num_args = 1..)]
    perplexity: Vec<PathBuf>,
    /// Most tokens that the model sees at once of calibration texts and of those whose perplexity is wanted. Default: the
    /// model's max_position_embeddings, but at most 2048
    #[arg(long, value_name = "N")]
    max_length: Option<usize>,
    /// Type in which the model computes for --calibration and --perplexity
    #[arg(long, value_enum, default_value = "f32")]
    compute_dtype: Precision,
    /// Where it computes
    #[arg(long, value_enum, default_value = "cpu")]
    device: DeviceKind,
}

/// What a model reads, and where.
pub(super) struct Texts {
    sequences: Vec<Vec<i64>>,
    calibration: Work,
    perplexity: Option<(Vec<Task>, Work)>,
    encoder: Option<Encoder>,
    devices: Vec<Device>,
    settings: Settings,
}

impl CalibrationArgs {
    /// Whether there is something to read.
    pub fn is_given(&self) -> bool {
        !self.calibration.is_empty() || !self.perplexity.is_empty()
    }

    /// What the model of a folder is to read; files that are wrong are refused before anything is computed. Fails if a
    /// file, a number or the device cannot be used.
    pub fn texts(&self, from: &Path, folder: &HfFolder) -> Result<Texts> {
        if self.calibration_samples == 0 {
            bail!("--calibration-samples 0 leaves nothing to do; nearest legal: 1");
        }
        let (config, generation) = (folder.config(), folder.generation());
        let layout = ParallelLayout::default();
        let max_length = causal_length(config, &layout, self.max_length, Some(LONGEST))?;
        let devices = self.device.devices(&layout)?;
        let settings = Settings::new(devices.clone(), layout, self.compute_dtype);
        let (calibration, sequences) = (Work::default(), Vec::new());
        let mut texts = Texts { sequences, calibration, perplexity: None, encoder: None, devices, settings };
        if !self.is_given() {
            return Ok(texts);
        }
        let prefixes: Vec<u32> = generation.bos_token_id.into_iter().chain(generation.eos_token_id.clone()).collect();
        let encoder = Encoder::open(from, &prefixes, false)?;
        let limits = Limits { max_length, max_new_tokens: 1, vocab_size: config.vocab_size() };
        let read = |files: &[PathBuf]| -> Result<(Vec<Task>, Work)> {
            let tasks = files.iter().map(|path| read_documents(path, usize::MAX)).collect::<Result<Vec<_>, _>>()?;
            let work = Work::new(&tasks, &encoder, &limits)?;
            Ok((tasks, work))
        };
        texts.calibration = read(&self.calibration)?.1;
        texts.calibration.requests.truncate(self.calibration_samples);
        let windows = texts.calibration.requests.iter();
        // Of each window the inputs, not the last token, which is only predicted.
        texts.sequences = windows.map(|window| window.tokens[..window.tokens.len() - 1].to_vec()).collect();
        if !self.perplexity.is_empty() {
            texts.perplexity = Some(read(&self.perplexity)?);
        }
        texts.encoder = Some(encoder);
        Ok(texts)
    }
}

impl Texts {
    /// The model that reads the calibration texts.
    pub fn calibration<'a>(&'a self, folder: &'a HfFolder) -> Calibration<'a> {
        Calibration {
            config: folder.config(),
            source: folder,
            sequences: &self.sequences,
            device: &self.devices[0],
            dtype: self.settings.dtype,
        }
    }

    /// The sum of the losses of the calibration texts' tokens. Fails if the model cannot compute.
    pub fn loss(&self, model: (&FamilyConfig, &dyn WeightSource)) -> Result<f64, EvalError> {
        let Some(encoder) = &self.encoder else { return Ok(0.0) };
        let answers = compute(model, &self.calibration, encoder.tokenizer(), &self.settings())?;
        Ok(-answers.scores.iter().map(|score| score.log_likelihood).sum::<f64>())
    }

    /// The perplexity per token of each file, as `eval` has it. Fails if the model cannot compute.
    pub fn perplexities(&self, folder: &HfFolder) -> Result<Vec<(String, f64)>, EvalError> {
        let (Some((tasks, work)), Some(encoder)) = (&self.perplexity, &self.encoder) else { return Ok(Vec::new()) };
        let answers = compute((folder.config(), folder), work, encoder.tokenizer(), &self.settings())?;
        let results = results(tasks, work, &answers, ExactMatch::default());
        let perplexity = |result: &crate::eval::TaskResult| {
            result.metrics.iter().find(|metric| metric.name == "token_perplexity").map(|metric| metric.value)
        };
        Ok(results.iter().filter_map(|result| Some((result.name.clone(), perplexity(result)?))).collect())
    }

    fn settings(&self) -> EvalSettings {
        EvalSettings { forward: self.settings.clone(), batch_size: 1, stop_tokens: Vec::new() }
    }
}

/// A line for each file.
pub(super) fn compared(before: &[(String, f64)], after: &[(String, f64)]) -> String {
    let line = |((name, before), (_, after)): (&(String, f64), &(String, f64))| {
        format!("{name}: perplexity per token {before:.4} before, {after:.4} after\n")
    };
    before.iter().zip(after).map(line).collect()
}
