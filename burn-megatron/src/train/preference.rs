//! Pairs of answers as the data of a run.

use std::path::PathBuf;
use std::sync::Arc;

use super::TrainError;
use super::run_data::RunData;
use super::templated::{Rows, describe, tokenizer};
use crate::config::{Packing, RunConfig};
use crate::data::chat::{ChatReport, PairDataset, PairSet};
use crate::data::{Split, TokenDataset};
use crate::preference::PreferenceLoss;

/// Reads, renders and packs the pairs of `[preference]`. Fails if a row cannot be used, or there is nothing to learn or
/// to evaluate on.
pub(super) fn open(config: &RunConfig) -> Result<RunData, TrainError> {
    let (preference, data, training, evaluation) =
        (&config.preference, &config.data, &config.training, &config.evaluation);
    let (path, tokenizer) = tokenizer(config)?;
    let read = |files: &[PathBuf]| {
        let set = PairSet {
            files: files.to_vec(),
            packing: preference.packing == Packing::BestFit,
            too_long: preference.too_long,
            skip_bad_rows: preference.skip_bad_rows,
            mismatched: preference.of_pairs.loss == PreferenceLoss::Kto,
        };
        PairDataset::open(&tokenizer, &set, training.seq_length).map_err(TrainError::Preference)
    };
    let (train, report) = read(&preference.train)?;
    let mut notes = vec![note("training", &train, &report)];
    let evaluates = evaluation.batches > 0 || evaluation.final_batches > 0;
    let share = data.split.shares()[Split::Valid as usize];
    let (train, valid) = match () {
        _ if !evaluates => (train, None),
        _ if !preference.validation.is_empty() => {
            let (valid, report) = read(&preference.validation)?;
            notes.push(note("validation", &valid, &report));
            (train, Some(valid))
        }
        _ if share > 0.0 => {
            let [train, valid] = train.split(share, data.seed, "preference").map_err(TrainError::Preference)?;
            (train, Some(valid))
        }
        _ => (train, None),
    };
    let train: Arc<dyn TokenDataset> = Arc::new(train.shuffled(data.samples, data.seed));
    let most = |batches: usize| batches.saturating_mul(training.global_batch);
    let last = valid.as_ref().filter(|_| evaluation.final_batches > 0).cloned();
    // A part of the validation data, with which it shares what the reference model says.
    let last = last.map(|last| Arc::new(last.first(most(evaluation.final_batches))) as Arc<dyn TokenDataset>);
    let valid = valid.map(|valid| Arc::new(valid) as Arc<dyn TokenDataset>);
    Ok(RunData { valid: valid.unwrap_or_else(|| train.clone()), train, last, tokenizer: Some(path), notes, grpo: None })
}

fn note(part: &str, data: &PairDataset, report: &ChatReport) -> String {
    describe(part, &Rows { what: "pairs", learned: "in answers" }, (data.sequences(), data.padding()), report)
}
