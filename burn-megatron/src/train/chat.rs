//! Conversations as the data of a run.

use std::path::PathBuf;
use std::sync::Arc;

use super::TrainError;
use super::run_data::RunData;
use super::templated::{Rows, describe, tokenizer};
use crate::config::RunConfig;
use crate::data::chat::{ChatBlend, ChatDataset, ChatReport};
use crate::data::{Split, TokenDataset};

/// Reads, renders and packs the conversations of `[chat]`. Fails if a row cannot be used, or there is nothing to learn
/// or to evaluate on.
pub(super) fn open(config: &RunConfig) -> Result<RunData, TrainError> {
    let (chat, data, training, evaluation) = (&config.chat, &config.data, &config.training, &config.evaluation);
    let (path, tokenizer) = tokenizer(config)?;
    let read = |files: &[PathBuf]| ChatDataset::open(&tokenizer, &chat.set(files), training.seq_length);

    // Files with weights are packed one by one.
    let sets: Vec<&[PathBuf]> = match &chat.weights {
        None => vec![&chat.train],
        Some(_) => chat.train.chunks(1).collect(),
    };
    let (mut train, mut notes) = (Vec::new(), Vec::new());
    for set in sets {
        let (part, report) = read(set)?;
        let name = if chat.weights.is_some() { set[0].display().to_string() } else { "training".into() };
        notes.push(note(&name, &part, &report));
        train.push(part);
    }
    let evaluates = evaluation.batches > 0 || evaluation.final_batches > 0;
    let share = data.split.shares()[Split::Valid as usize];
    let mut valid = Vec::new();
    if evaluates && !chat.validation.is_empty() {
        let (part, report) = read(&chat.validation)?;
        notes.push(note("validation", &part, &report));
        valid.push(part);
    } else if evaluates && share > 0.0 {
        for part in &mut train {
            let [rest, held_out] = part.clone().split(share, data.seed, "chat")?;
            *part = rest;
            valid.push(held_out);
        }
    }
    let weights = chat.weights.clone().unwrap_or_else(|| vec![1.0]);
    let train: Arc<dyn TokenDataset> = Arc::new(ChatBlend::weighted(train, &weights, data.samples, data.seed));
    let valid = (!valid.is_empty()).then(|| ChatBlend::all(valid));
    let most = |batches: usize| batches.saturating_mul(training.global_batch);
    let last = valid.as_ref().filter(|_| evaluation.final_batches > 0).cloned();
    let last = last.map(|last| Arc::new(last.first(most(evaluation.final_batches))) as Arc<dyn TokenDataset>);
    let valid = valid.filter(|_| evaluation.batches > 0).map(|valid| Arc::new(valid) as Arc<dyn TokenDataset>);
    Ok(RunData { valid: valid.unwrap_or_else(|| train.clone()), train, last, tokenizer: Some(path), notes, grpo: None })
}

fn note(part: &str, data: &ChatDataset, report: &ChatReport) -> String {
    describe(part, &Rows { what: "samples", learned: "in the loss" }, (data.sequences(), data.padding()), report)
}
