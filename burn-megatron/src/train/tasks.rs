//! Tasks that are scored while a run trains.

use std::path::Path;

use models::ModelConfig;
use models::layout::sequence_unit;

use super::TrainError;
use crate::config::RunConfig;
use crate::eval::{Encoder, Limits, TrainingTasks, read_task};
use crate::hf::GenerationConfig;

/// The tasks of `evaluation.tasks`, if there are any. Fails if a row cannot be used, with file and line.
pub(super) fn open(config: &RunConfig) -> Result<Option<TrainingTasks>, TrainError> {
    let files = &config.evaluation.tasks;
    let Some(tokenizer) = config.data.tokenizer.as_deref().filter(|_| !files.is_empty()) else { return Ok(None) };
    let folder = Path::new(tokenizer).parent().unwrap_or(Path::new("."));
    let tasks = files.iter().map(|file| read_task(file, usize::MAX)).collect::<Result<_, _>>()?;
    let encoder = Encoder::open(folder, &GenerationConfig::of_folder(folder)?.prefixes(), false)?;
    let (seq, vocab_size) = (config.training.seq_length, config.model.config.vocab_size());
    let limits = Limits { max_length: seq, max_new_tokens: 1, vocab_size };
    Ok(Some(TrainingTasks::new(tasks, &encoder, &limits, sequence_unit(&config.parallel))?))
}
