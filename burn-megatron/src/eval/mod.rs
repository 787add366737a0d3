//! Evaluation as EleutherAI's lm-evaluation-harness defines it: log-likelihoods of continuations, multiple choice,
//! perplexity of texts over rolling windows, and generation with exact match; in every layout that
//! [`forward`](crate::forward) has.
//!
//! [`read_task`] and [`read_documents`] give questions, [`Encoder`] tokenizes as the harness does, [`Work`] is what a
//! model has to compute of them, [`compute`] does it on all ranks, [`compute_module`] with a T5, and [`results`] are the metrics.

mod answer;
mod encode;
mod error;
mod likelihood;
mod module;
mod results;
mod run;
mod task;
mod text;
mod training;
mod work;

pub use encode::Encoder;
pub use error::EvalError;
pub use likelihood::{Batching, Request, Scored};
pub use module::compute_module;
pub use results::{Metric, TaskResult, results, table};
pub use run::{Answers, EvalSettings, compute};
pub use task::{Kind, Question, Task, read_documents, read_task};
pub use text::ExactMatch;
pub use training::TrainingTasks;
pub use work::{Limits, Prompt, Work};
