//! Prompts as the data of a run.

use std::path::PathBuf;
use std::sync::Arc;

use indicatif::HumanCount;
use tokenizers::Tokenizer;

use super::TrainError;
use super::run_data::{RunData, fits};
use crate::config::RunConfig;
use crate::data::preprocess::{end_of_document, vocab_size};
use crate::data::{PromptDataset, PromptSet, TokenizerFileError, read_tokenizer};
use crate::grpo::{ExactAnswer, Reward};
use crate::hf::GenerationConfig;
use crate::learner::GrpoRun;

/// Reads the prompts of `[grpo]`, which `reward` judges; without one, an exact match of the answer. Fails if a row
/// cannot be used, or there is nothing to complete.
pub(super) fn open(config: &RunConfig, reward: Option<Arc<dyn Reward>>) -> Result<RunData, TrainError> {
    let (grpo, data, seq_length) = (&config.grpo, &config.data, config.training.seq_length);
    let tokenizer = check_tokenizer(config)?;
    let reward = match reward {
        Some(reward) => reward,
        None => Arc::new(ExactAnswer::new(grpo.answer_pattern.as_deref()).map_err(TrainError::Reward)?),
    };
    let path = PathBuf::from(data.tokenizer.as_deref().expect("the configuration was checked"));
    let set = PromptSet {
        files: grpo.train.clone(),
        tokenizer: path.clone(),
        template: grpo.template.clone(),
        generations: grpo.of_completions.num_generations,
        // The last token of a completion is not read.
        longest: (seq_length + 1).saturating_sub(grpo.of_completions.max_completion_length),
        skip_bad_rows: grpo.skip_bad_rows,
    };
    let opened = PromptDataset::open(&set, (seq_length, data.samples, data.seed), |row| reward.check(row));
    let (prompts, skipped) = opened.map_err(TrainError::Grpo)?;
    let count = |number: usize| HumanCount(number as u64);
    let mut note =
        format!("{} prompts, each completed {} times", count(prompts.prompts()), grpo.of_completions.num_generations);
    if let Some(first) = &skipped.first {
        note += &format!("; {} bad rows left out, the first: {first}", count(skipped.rows));
    }
    let prompts = Arc::new(prompts);
    let run = GrpoRun {
        prompts: prompts.clone(),
        reward,
        stop_tokens: stop_tokens(config, &tokenizer)?,
        seed: config.training.seed,
    };
    let (train, valid) = (prompts.clone(), prompts);
    Ok(RunData { valid, train, last: None, tokenizer: Some(path), notes: vec![note], grpo: Some(run) })
}

/// What ends a completion: what the files of the model say, `data.eod-id`, and the tokenizer's end of a document.
fn stop_tokens(config: &RunConfig, tokenizer: &Tokenizer) -> Result<Vec<i64>, TrainError> {
    let mut all = match &config.model.hf {
        Some(folder) => GenerationConfig::of_folder(folder)?.stop_tokens(folder, tokenizer)?,
        None => Vec::new(),
    };
    all.extend(config.data.eod_id.into_iter().chain(end_of_document(tokenizer, None)));
    all.sort_unstable();
    all.dedup();
    Ok(all)
}

/// The tokenizer, if it can be used with the model. The error says why not.
pub(super) fn check_tokenizer(config: &RunConfig) -> Result<Tokenizer, TrainError> {
    let path = PathBuf::from(config.data.tokenizer.as_deref().unwrap_or_default());
    let refused = |error: TokenizerFileError| TrainError::Tokenizer { path: path.clone(), what: error.to_string() };
    let tokenizer = read_tokenizer(&path).map_err(refused)?;
    fits(config, vocab_size(&tokenizer), Some(&path))?;
    Ok(tokenizer)
}
