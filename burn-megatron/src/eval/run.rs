//! The work of an evaluation on all ranks.

use backend_dist::launch::Rank;
use backend_dist::mesh::{Axis, Mesh, Nearest, ParallelLayout};
use models::layout::sequence_unit;
use models::{CausalLm, FamilyConfig, ModelConfig, WeightSource, WithModel};
use tokenizers::Tokenizer;

use super::EvalError;
use super::answer::Answer;
use super::likelihood::{Batching, Scored, scores};
use super::work::{Prompt, Work};
use crate::forward::{ForwardError, Settings, build, check_layout};
use crate::generate::{GenerateError, GenerateOptions, Sampling, generate_batch};

/// Texts that are written at once for each sequence that is scored at once: they have no logits but of their last token.
const WRITTEN: usize = 8;

/// How to compute.
#[derive(Clone, Debug)]
pub struct EvalSettings {
    /// Layout, cluster, precision and adapter; without gradients.
    pub forward: Settings,
    /// Sequences that a data-parallel rank scores at once; of texts that it writes, 8 times as many.
    pub batch_size: usize,
    /// Tokens that end an answer.
    pub stop_tokens: Vec<i64>,
}

/// What a model says to all of a [`Work`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answers {
    /// By request.
    pub scores: Vec<Scored>,
    /// By prompt.
    pub texts: Vec<String>,
}

/// Does the work with a model that has the weights of `source`; texts are written with `tokenizer`. Fails if model and
/// layout do not fit, texts are to be generated in a layout that cannot or are too long, or a rank fails.
pub fn compute(
    (config, source): (&FamilyConfig, &dyn WeightSource),
    work: &Work,
    tokenizer: &Tokenizer,
    settings: &EvalSettings,
) -> Result<Answers, EvalError> {
    if settings.batch_size == 0 {
        return Err(EvalError::Zero { key: "--batch-size", nearest: 1 });
    }
    config.visit(Run { source, work, tokenizer, settings })
}

struct Run<'a> {
    source: &'a dyn WeightSource,
    work: &'a Work,
    tokenizer: &'a Tokenizer,
    settings: &'a EvalSettings,
}

/// What one rank contributes, by index of request and prompt.
pub(super) type Share = (Vec<(usize, Scored)>, Vec<(usize, String)>);

impl Answers {
    /// What all ranks contributed; of a request each may have a part.
    pub(super) fn of(work: &Work, shares: impl IntoIterator<Item = Share>) -> Self {
        let none = Scored { log_likelihood: 0.0, is_greedy: true };
        let mut answers =
            Self { scores: vec![none; work.requests.len()], texts: vec![String::new(); work.prompts.len()] };
        for (scores, texts) in shares {
            for (index, share) in scores {
                let score = &mut answers.scores[index];
                score.log_likelihood += share.log_likelihood;
                score.is_greedy &= share.is_greedy;
            }
            texts.into_iter().for_each(|(index, text)| answers.texts[index] = text);
        }
        answers
    }
}

impl WithModel for Run<'_> {
    type Output = Result<Answers, EvalError>;

    fn with<M: CausalLm + 'static>(self, config: &M::Config) -> Self::Output {
        let Self { source, work, tokenizer, settings } = self;
        let Settings { layout, cluster, .. } = &settings.forward;
        check_layout(layout)?;
        if !work.prompts.is_empty() {
            experts_write_together(layout)?;
        }
        for Prompt { tokens, max_new_tokens, .. } in &work.prompts {
            GenerateOptions::new(*max_new_tokens, Sampling::greedy()).check(config, tokens).map_err(too_long)?;
        }
        let unit = sequence_unit(layout);
        config.dims().check(layout, unit).map_err(ForwardError::from)?;
        let mesh = Mesh::new(layout.clone()).map_err(ForwardError::from)?;
        let batching = Batching { sequences: settings.batch_size, unit, vocab: config.vocab_size() };
        let all = cluster.launch_all(&mesh, |rank| {
            let model = build::<M>(&rank, config, source, &settings.forward)?;
            let scores = scores(&rank, &model, &work.requests, batching);
            let how = (&settings.stop_tokens[..], settings.batch_size * WRITTEN);
            Ok((scores, texts(&rank, &model, &work.prompts, tokenizer, how)?))
        });
        let shares: Vec<Share> = all.map_err(ForwardError::from)?;
        Ok(Answers::of(work, shares))
    }
}

/// Data-parallel ranks write texts of their own, so that none may wait for another in its experts.
fn experts_write_together(layout: &ParallelLayout) -> Result<(), EvalError> {
    let (within, etp) = (layout.tp * layout.cp, layout.expert_tp());
    let refused = |key, size, total: usize| {
        let nearest = Nearest::where_legal(size, size, |size| total.is_multiple_of(size));
        Err(EvalError::Experts { key, size, ranks: within, nearest })
    };
    match layout.has_experts_within(within) {
        true => Ok(()),
        false if !within.is_multiple_of(etp) => refused("expert-tensor-parallel", etp, within),
        false => refused("expert-parallel", layout.ep, within / etp),
    }
}

/// With the flag that makes texts shorter.
fn too_long(error: GenerateError) -> EvalError {
    match error {
        GenerateError::TooLong { prompt, new, positions } => EvalError::TooLong { prompt, new, positions },
        error => error.into(),
    }
}

/// The continuations of this data-parallel rank's prompts, by the likeliest token each time; `at_once` are written together,
/// of about as many tokens.
fn texts<M: CausalLm>(
    rank: &Rank,
    model: &M,
    prompts: &[Prompt],
    tokenizer: &Tokenizer,
    (stop_tokens, at_once): (&[i64], usize),
) -> Result<Vec<(usize, String)>, GenerateError> {
    let (dp, is_first) = (rank.group(Axis::Dp), rank.group(Axis::Tp).rank() == 0 && rank.group(Axis::Cp).rank() == 0);
    let mut own: Vec<usize> = (dp.rank()..prompts.len()).step_by(dp.size()).collect();
    own.sort_by_key(|index| (prompts[*index].max_new_tokens, prompts[*index].tokens.len()));
    let mut all = Vec::new();
    for alike in own.chunk_by(|a, b| prompts[*a].max_new_tokens == prompts[*b].max_new_tokens) {
        let options = GenerateOptions {
            stop_tokens: stop_tokens.to_vec(),
            ..GenerateOptions::new(prompts[alike[0]].max_new_tokens, Sampling::greedy())
        };
        for together in alike.chunks(at_once) {
            let answer = |index: &usize| {
                let Prompt { tokens, until, .. } = &prompts[*index];
                Answer::new(tokenizer, tokens, until, stop_tokens)
            };
            let mut answers: Vec<Answer> = together.iter().map(answer).collect();
            let tokens: Vec<(&[i64], u64)> = together.iter().map(|index| (&*prompts[*index].tokens, 0)).collect();
            generate_batch(rank, model, &tokens, &options, |at, token| answers[at].push(token))?;
            if is_first {
                all.extend(together.iter().copied().zip(answers.into_iter().map(Answer::finish)));
            }
        }
    }
    Ok(all)
}
