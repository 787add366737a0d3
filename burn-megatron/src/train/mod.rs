//! A training run from its configuration, as `burn-megatron train` does it.
//!
//! [`Plan`] checks a run and tells what it would do; [`train`] opens its data ([`RunData`]) and does it.

mod chat;
mod data;
mod fp8;
mod grpo;
mod initial_adapter;
mod launch;
mod module;
mod plan;
mod preference;
mod resume;
mod run_data;
mod same_weights;
mod tasks;
mod teach;
mod templated;
#[cfg(test)]
mod tests;
mod token_ids;

use std::error::Error as _;
use std::io;
use std::path::PathBuf;

use backend_dist::comm::RunError;
use backend_dist::mesh::LayoutError;
use backend_dist::process::Processes;
use burn::tensor::Device;
use thiserror::Error;

use crate::checkpoint::{CheckpointError, lock_output};
use crate::config::ConfigErrors;
use crate::console::say;
use crate::data::chat::ChatError;
use crate::data::masked::MaskedError;
use crate::data::preprocess::{PreprocessError, Progress};
use crate::data::{DataError, SampleError};
use crate::eval::EvalError;
use crate::hf::HfFolderError;
use crate::learner::limit_of_files_is_an_error;
use crate::refusal::{Access, advice};
use data::Tokens;
pub(crate) use fp8::possible as fp8_possible;
pub(crate) use launch::stage_builder;
pub use launch::{STOPPED, TrainReport};
pub use module::{
    ModuleReport, ModuleRun, check_module, check_module_data, new_head, train_module, train_module_among,
};
pub use plan::Plan;
pub use resume::ResumePoint;
pub use run_data::RunData;
pub use teach::write_top_k;

/// Why a run did not start, or did not end well.
#[derive(Debug, Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum TrainError {
    /// The configuration, or what it names, is wrong.
    #[error(transparent)]
    Config(#[from] ConfigErrors),
    /// The ranks cannot be laid out.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// Text cannot be tokenized.
    #[error("{key}: {cause}")]
    Text { key: &'static str, cause: PreprocessError },
    /// A data set cannot be opened.
    #[error(transparent)]
    Data(#[from] DataError),
    /// Conversations cannot be used.
    #[error("[chat]: {0}")]
    Chat(#[from] ChatError),
    /// Pairs of answers cannot be used.
    #[error("[preference]: {0}")]
    Preference(ChatError),
    /// Prompts cannot be used.
    #[error("[grpo]: {0}")]
    Grpo(ChatError),
    /// The pattern of answers is none.
    #[error("grpo.answer-pattern: {0}")]
    Reward(String),
    /// Sentences make no samples.
    #[error("[masked]: {0}")]
    Masked(#[from] MaskedError),
    /// A plain Burn module cannot be trained so.
    #[error("{0}")]
    Module(String),
    /// Tasks cannot be used.
    #[error("evaluation.tasks: {0}")]
    Tasks(#[from] EvalError),
    /// The file of a teacher's likeliest tokens cannot be written or used.
    #[error("{}: {what}", path.display())]
    TopK { path: PathBuf, what: String },
    /// A sample cannot be read.
    #[error("{0}")]
    Sample(SampleError),
    /// The operating system refuses to make a folder.
    #[error("{}: {cause}{}", path.display(), advice(Access::Write, cause))]
    Io { path: PathBuf, cause: io::Error },
    /// The checkpoint to resume from cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The files that came with a model cannot be used.
    #[error(transparent)]
    HuggingFace(#[from] HfFolderError),
    /// Weights of a folder cannot be read.
    #[error("{0}")]
    Weights(String),
    /// A tokenizer cannot be used.
    #[error("data.tokenizer = {}: {what}", path.display())]
    Tokenizer { path: PathBuf, what: String },
    /// The tokenizer has tokens that the model does not have.
    #[error("{} has {tokens} tokens, but model.vocab-size = {vocabulary}; {advice}", path.display())]
    Vocabulary { path: PathBuf, tokens: usize, vocabulary: usize, advice: String },
    /// The data has a token that the model does not have.
    #[error("{key}: {} has token {id}, but model.vocab-size = {vocabulary}; {advice}", prefix.display())]
    Token { key: &'static str, prefix: PathBuf, id: i64, vocabulary: usize, advice: String },
    /// The data has a token that the tokenizer does not have.
    #[error("data.tokenizer = {} has {tokens} tokens, {key} have {ids}; name the tokenizer that wrote them", path.display())]
    OtherTokenizer { path: PathBuf, tokens: usize, key: &'static str, ids: i64 },
    /// A part of the data has not even one sequence.
    #[error(
        "there is no {part} sequence of {seq_length} + 1 tokens; give it a larger share in data.split, more files, or a \
         smaller training.seq-length; several text files are divided whole unless data.text-documents = paragraph"
    )]
    NoSequence { part: &'static str, seq_length: usize },
    /// Another process has failed before the training began.
    #[error(transparent)]
    Run(#[from] Box<RunError>),
    /// The processes would not resume from the same checkpoint.
    #[error(
        "process {process} would start {theirs}, but process 0 {ours}: checkpoint.directory must be on a file system that all \
         hosts share"
    )]
    Start { process: usize, theirs: String, ours: String },
    /// Restarts are for one process.
    #[error(
        "training.max-restarts = {restarts} begins again in a process whose rank has failed, and there are {processes} processes: their \
         launcher starts them again (torchrun --max-restarts, srun with --requeue); nearest legal: 0"
    )]
    Restarts { restarts: usize, processes: usize },
    /// The processes read other data.
    #[error(
        "process {process} has {theirs}, but process 0 {ours}: the files of data.prefixes and distill.logits, or of output.directory \
         for data.text, must be the same on all hosts"
    )]
    OtherData { process: usize, theirs: String, ours: String },
    /// The system gives too few threads.
    #[error(
        "the system does not give enough threads ({0}); allow more (`ulimit -u`, the job's limit), or ask for fewer with \
         RAYON_NUM_THREADS"
    )]
    Threads(String),
    /// The training failed; what went wrong was printed when the ranks stopped.
    #[error("the training failed")]
    Failed,
}

/// Trains as planned, rank `r` on `devices[r % devices.len()]`. `progress` is told how far the tokenizing of text is.
pub fn train(
    plan: &Plan,
    devices: Vec<Device>,
    progress: &mut (dyn FnMut(Progress) + Send),
) -> Result<TrainReport, TrainError> {
    train_among(plan, None, devices, progress)
}

/// [`train`] in one process of several: each has made the same plan and has the devices of its own ranks. Process 0
/// tokenizes text and builds sample orders before the others look at them; it alone shows something and writes logs.
pub fn train_among(
    plan: &Plan,
    processes: Option<&Processes>,
    devices: Vec<Device>,
    progress: &mut (dyn FnMut(Progress) + Send),
) -> Result<TrainReport, TrainError> {
    let config = plan.config();
    if let Some(processes) = processes.filter(|all| all.count() > 1 && config.training.max_restarts > 0) {
        let (restarts, processes) = (config.training.max_restarts, processes.count());
        return Err(TrainError::Restarts { restarts, processes });
    }
    limit_of_files_is_an_error();
    // Before anything is written: two runs in one folder would mix their data and logs.
    let lock = || lock_output(&config.output.directory);
    let _lock = match processes {
        None => Some(lock()?),
        Some(processes) => processes.attempt(|| processes.is_first().then(lock).transpose())?,
    };
    match processes {
        None => start_threads()?,
        Some(processes) => processes.attempt(start_threads)?,
    }
    let mut data = match processes {
        None => RunData::of(config, plan.reward(), Tokens::find(config, progress)?)?,
        Some(processes) => {
            same_start(plan, processes)?;
            let tokens: Tokens = processes.from_first("tokens", || Tokens::find(config, progress))?;
            let data = processes.first_then_others("data", || RunData::of(config, plan.reward(), tokens))?;
            same_data(&data, processes)?;
            data
        }
    };
    let with_teacher = || teach::taught(config, data.train.clone());
    data.train = if let Some(processes) = processes { processes.attempt(with_teacher)? } else { with_teacher()? };
    if processes.is_none_or(Processes::is_first) {
        let label = match config.has_conversations() {
            true if config.grpo.is_used() => "grpo",
            true => "chat",
            false => "hint",
        };
        data.notes.iter().for_each(|note| say(format_args!("{label:<12} {note}")));
    }
    let launch = launch::Launch { plan, processes: processes.cloned(), devices, data };
    config.model.config.visit(launch)
}

/// Starts the threads that share work within the process, which would panic where the system refuses them later.
fn start_threads() -> Result<(), TrainError> {
    threads_started(rayon::ThreadPoolBuilder::new().build_global())
}

fn threads_started(built: Result<(), rayon::ThreadPoolBuildError>) -> Result<(), TrainError> {
    match built {
        // Somebody has started them already, or else there is a cause.
        Err(error) if error.source().is_some() => Err(TrainError::Threads(error.to_string())),
        _ => Ok(()),
    }
}

/// Whether all processes see the checkpoint that process 0 sees.
fn same_start(plan: &Plan, processes: &Processes) -> Result<(), TrainError> {
    let step = plan.start.as_ref().map(|start| start.step);
    let all = processes.channel("checkpoint to resume from").all_gather(&step)?;
    let text = |step: Option<u64>| step.map_or("anew".into(), |step| format!("from step {step}"));
    match all.iter().position(|other| *other != all[0]) {
        Some(process) => Err(TrainError::Start { process, theirs: text(all[process]), ours: text(all[0]) }),
        None => Ok(()),
    }
}

/// Whether all processes read the sequences that process 0 reads.
fn same_data(data: &RunData, processes: &Processes) -> Result<(), TrainError> {
    let all: Vec<Vec<String>> = processes.channel("what the data is").all_gather(&data.digest()?)?;
    for (process, lines) in all.iter().enumerate() {
        if let Some((theirs, ours)) = lines.iter().zip(&all[0]).find(|(theirs, ours)| theirs != ours) {
            return Err(TrainError::OtherData { process, theirs: theirs.clone(), ours: ours.clone() });
        }
    }
    Ok(())
}

impl From<RunError> for TrainError {
    fn from(error: RunError) -> Self {
        Self::Run(Box::new(error))
    }
}
