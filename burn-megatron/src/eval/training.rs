//! Tasks during training, with the engine that trains: in every layout that it has.

use models::CausalLm;

use super::likelihood::{Scored, passes};
use super::results::{Metric, TaskResult, results};
use super::run::Answers;
use super::task::{Kind, Task};
use super::text::ExactMatch;
use super::work::{Limits, Work};
use super::{Encoder, EvalError, Question};
use crate::engine::{EngineError, RankEngine, TokenBatch};

/// Tasks of log-likelihoods, ready for a model that is being trained.
#[derive(Clone, Debug)]
pub struct TrainingTasks {
    tasks: Vec<Task>,
    work: Work,
    /// What the length of a sequence must be a multiple of.
    unit: usize,
}

impl TrainingTasks {
    /// Tasks for sequences that are padded to a multiple of `unit`. Fails as [`Work::new`], and if a task wants texts
    /// to be generated.
    pub fn new(tasks: Vec<Task>, encoder: &Encoder, limits: &Limits, unit: usize) -> Result<Self, EvalError> {
        for task in &tasks {
            if let Some((line, _)) = task.questions.iter().find(|(_, it)| matches!(it, Question::Generate { .. })) {
                let what =
                    "target: texts are not generated during training; name the file with `burn-megatron eval --task`";
                return Err(EvalError::Question { file: task.path.clone(), line: *line, what: what.into() });
            }
        }
        let work = Work::new(&tasks, encoder, limits)?;
        Ok(Self { tasks, work, unit })
    }

    /// The metrics of all tasks but those that need the likeliest tokens. All ranks call it together.
    pub fn evaluate<M: CausalLm>(&self, engine: &mut RankEngine<M>) -> Result<Vec<TaskResult>, EngineError> {
        let plan = engine.plan();
        let sequences = plan.micro * plan.data_parallel;
        let none = Scored { log_likelihood: 0.0, is_greedy: false };
        let mut scores = vec![none; self.work.requests.len()];
        for pass in passes(&self.work.requests, sequences) {
            let sums = engine.log_probabilities(&self.batch(&pass, sequences))?;
            for (index, sums) in pass.into_iter().zip(sums) {
                scores[index].log_likelihood = sums.iter().sum();
            }
        }
        let answers = Answers { scores, texts: Vec::new() };
        let mut all = results(&self.tasks, &self.work, &answers, ExactMatch::default());
        let known = |kind: Kind, metric: &Metric| kind != Kind::LogLikelihood || metric.name != "acc";
        all.iter_mut().for_each(|result| result.metrics.retain(|metric| known(result.kind, metric)));
        Ok(all)
    }

    /// Requests as sequences of one length, of which their scored tokens count; as many as there must be.
    fn batch(&self, requests: &[usize], sequences: usize) -> TokenBatch {
        let requests: Vec<_> = requests.iter().map(|index| &self.work.requests[*index]).collect();
        let longest = requests.iter().map(|request| request.tokens.len() - 1).max().unwrap_or(1);
        let seq = longest.next_multiple_of(self.unit);
        let (mut tokens, mut labels) = (vec![0; sequences * seq], vec![0; sequences * seq]);
        let mut mask = vec![false; sequences * seq];
        for (sequence, request) in requests.iter().enumerate() {
            let (start, inputs) = (sequence * seq, request.tokens.len() - 1);
            tokens[start..start + inputs].copy_from_slice(&request.tokens[..inputs]);
            labels[start..start + inputs].copy_from_slice(&request.tokens[1..]);
            mask[start + inputs - request.scored..start + inputs].fill(true);
        }
        TokenBatch {
            sequences,
            seq,
            tokens,
            labels,
            mask: Some(mask),
            documents: Some(vec![vec![0]; sequences]),
            references: Some(vec![vec![0.0]; sequences]),
            taught: None,
        }
    }
}
