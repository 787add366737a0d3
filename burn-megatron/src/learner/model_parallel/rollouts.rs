//! Completions for a step of GRPO: each rank draws those of its own sequences, and has them judged.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use backend_dist::launch::{BoxError, Rank};
use backend_dist::mesh::Axis;
use backend_dist::shard::stable_hash;
use models::layers::paged::Step;
use models::layout::sequence_unit;
use models::{CausalLm, PagedKvCache};
use serde::{Deserialize, Serialize};

use crate::data::{Prompt, PromptDataset};
use crate::engine::{RankEngine, Rollouts, TokenBatch};
use crate::generate::{Ended, GenerateOptions, Generated, ModelRanks, Sampling, generate_by};
use crate::grpo::{Completion, GrpoConfig, Reward, RewardStats};

/// What a run of GRPO completes, and who judges it; the losses' constants are those of
/// [`EngineConfig::grpo`](crate::engine::EngineConfig::grpo).
#[derive(Clone)]
pub struct GrpoRun {
    /// The prompts, which are also the data set of the run.
    pub prompts: Arc<PromptDataset>,
    /// The judge.
    pub reward: Arc<dyn Reward>,
    /// Tokens that end a completion.
    pub stop_tokens: Vec<i64>,
    /// Of the draws.
    pub seed: u64,
}

/// Completions of a global batch, as far as this rank has them.
pub(super) struct Drawn {
    /// Which global batch it is, see [`GrpoRun::batch`].
    pub batch: usize,
    pub micro_batches: Vec<TokenBatch>,
    pub rollouts: Vec<Rollouts>,
    pub stats: RewardStats,
}

/// A completion and what it is worth, on its way to the other ranks.
#[derive(Clone, Serialize, Deserialize)]
struct Judged {
    sequence: usize,
    tokens: Vec<i64>,
    ended: bool,
    reward: f64,
}

impl GrpoRun {
    /// The global batch of completions that the step beginning at the sample `first` trains on.
    pub(super) fn batch(&self, config: &GrpoConfig, first: usize, global: usize) -> usize {
        first / global.max(1) / config.num_iterations.max(1)
    }

    /// Draws the completions of a global batch. All ranks call it together. Fails if a completion cannot be drawn or
    /// judged.
    pub(super) fn draw<M: CausalLm>(
        &self,
        rank: &Rank,
        engine: &mut RankEngine<M>,
        config: &GrpoConfig,
        batch: usize,
    ) -> Result<Drawn, BoxError> {
        let (own, global) = (engine.sequences_of_step(), engine.plan().global());
        let prompt = |sequence: usize| self.prompts.prompt(batch * global + sequence);
        // Ranks that share sequences draw some of their completions each.
        let context = rank.group(Axis::Cp);
        let mine = |sequence: &usize| sequence % context.size() == context.rank();
        let mine: Vec<usize> = own.iter().cloned().flatten().filter(mine).collect();
        let judged = self.judged(rank, engine, config, (batch, &mine), &prompt)?;
        let of_sequences: Vec<Judged> = context.all_gather_host(judged).into_iter().flatten().collect();
        let mut all: Vec<(usize, f64, usize, bool)> = Vec::with_capacity(global);
        let facts = of_sequences.iter().map(|it| (it.sequence, it.reward, it.tokens.len(), it.ended));
        all.extend(rank.group(Axis::Dp).all_gather_host(facts.collect::<Vec<_>>()).into_iter().flatten());
        all.sort_by_key(|(sequence, ..)| *sequence);
        let rewards: Vec<f64> = all.iter().map(|(_, reward, ..)| *reward).collect();
        let lengths: Vec<usize> = all.iter().map(|(_, _, length, _)| *length).collect();
        let ended: Vec<bool> = all.iter().map(|(.., ended)| *ended).collect();
        let advantages = config.advantages(&rewards);

        // One length for all ranks: the last token is not read.
        let longest = lengths.iter().enumerate().map(|(sequence, length)| prompt(sequence).tokens.len() + length - 1);
        let seq = longest.max().unwrap_or(1).next_multiple_of(sequence_unit(rank.mesh.layout()));
        let completions: BTreeMap<usize, &[i64]> =
            of_sequences.iter().map(|it| (it.sequence, it.tokens.as_slice())).collect();
        let filled = |sequences: &std::ops::Range<usize>| {
            let pairs = sequences.clone().map(|sequence| (prompt(sequence).tokens.as_slice(), completions[&sequence]));
            sequences_of(&pairs.collect::<Vec<_>>(), seq)
        };
        let micro_batches: Vec<TokenBatch> = own.iter().map(filled).collect();
        let old = match config.num_iterations > 1 {
            true => Some(engine.token_log_probabilities(&micro_batches)?),
            false => None,
        };
        let reference = engine.reference_log_probabilities(&micro_batches)?;
        let of = |all: &Option<Vec<Vec<f64>>>, at: usize| all.as_ref().map(|all| all[at].clone());
        let rollouts = own.iter().enumerate().map(|(at, sequences)| Rollouts {
            advantages: advantages[sequences.clone()].to_vec(),
            old: of(&old, at),
            reference: of(&reference, at),
        });
        let (rollouts, stats) =
            (rollouts.collect(), RewardStats::of(&rewards, &lengths, &ended, config.num_generations));
        Ok(Drawn { batch, micro_batches, rollouts, stats })
    }

    /// The completions of `sequences`, all at once; a prompt of several is read once, but for its last block. The first of
    /// the ranks of a model judges them.
    fn judged<'a, M: CausalLm>(
        &self,
        rank: &Rank,
        engine: &mut RankEngine<M>,
        config: &GrpoConfig,
        (batch, sequences): (usize, &[usize]),
        prompt: &impl Fn(usize) -> &'a Prompt,
    ) -> Result<Vec<Judged>, BoxError> {
        let sampling = Sampling { temperature: config.temperature, ..Sampling::greedy() };
        let options = GenerateOptions {
            stop_tokens: self.stop_tokens.clone(),
            enable_prefix_caching: engine.shares_prefixes(),
            enforce_eager: true,
            ..GenerateOptions::new(config.max_completion_length, sampling)
        };
        let seed = |sequence: &usize| stable_hash(&format!("grpo {} {batch} {sequence}", self.seed));
        let prompts: Vec<(&[i64], u64)> =
            sequences.iter().map(|sequence| (prompt(*sequence).tokens.as_slice(), seed(sequence))).collect();
        let (layers, stages) = (rank.group(Axis::Tp), rank.group(Axis::Pp));
        let ranks = ModelRanks {
            stages: (stages.size() > 1).then(|| (stages.clone(), engine.head_rank())),
            together: engine.extends_together(),
            ..ModelRanks::whole(rank)
        };
        let on_token = &mut |_: usize, _: i64| ControlFlow::Continue(());
        let texts = match engine.whole() {
            Some(model) => {
                let model = model.valid();
                let read = |step: &Step, cache: &mut PagedKvCache| Some(model.extend(step, cache));
                generate_by(read, &ranks, &prompts, &options, on_token)?
            }
            None => generate_by(|step, cache| engine.extend(step, cache), &ranks, &prompts, &options, on_token)?,
        };
        let judged = |(sequence, text): (&usize, Generated)| {
            let ended = text.ended == Ended::StopToken;
            Judged { sequence: *sequence, tokens: text.tokens, ended, reward: 0.0 }
        };
        let mut all: Vec<Judged> = sequences.iter().zip(texts).map(judged).collect();
        let judge = || all.iter().map(|it| self.reward(prompt(it.sequence), &it.tokens)).collect::<Result<Vec<_>, _>>();
        let of_stages = match layers.rank() {
            0 => Some(stages.broadcast_host((stages.rank() == 0).then(judge).transpose()?, 0)),
            _ => None,
        };
        let rewards = layers.broadcast_host(of_stages, 0);
        all.iter_mut().zip(rewards).for_each(|(it, reward)| it.reward = reward);
        Ok(all)
    }

    fn reward(&self, prompt: &Prompt, tokens: &[i64]) -> Result<f64, BoxError> {
        let text = self.prompts.text(tokens)?;
        let completion = Completion { row: &prompt.row, prompt: &prompt.text, text: &text };
        let reward = self.reward.reward(&completion)?;
        match reward.is_finite() {
            true => Ok(reward),
            false => {
                Err(format!("the reward of `{text}` after `{}` is {reward}, not a finite number", prompt.text).into())
            }
        }
    }
}

/// Prompts with their completions as sequences of `seq` predictions, of which the tokens of completions count.
fn sequences_of(pairs: &[(&[i64], &[i64])], seq: usize) -> TokenBatch {
    let (mut tokens, mut labels) = (vec![0; pairs.len() * seq], vec![0; pairs.len() * seq]);
    let mut mask = vec![false; pairs.len() * seq];
    for (at, (prompt, completion)) in pairs.iter().enumerate() {
        let (start, all) = (at * seq, [*prompt, *completion].concat());
        let inputs = all.len() - 1;
        tokens[start..start + inputs].copy_from_slice(&all[..inputs]);
        labels[start..start + inputs].copy_from_slice(&all[1..]);
        mask[start + prompt.len() - 1..start + inputs].fill(true);
    }
    TokenBatch { sequences: pairs.len(), seq, tokens, labels, mask: Some(mask), ..TokenBatch::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_model_wrote_counts() {
        let batch = sequences_of(&[(&[1, 2], &[3, 4]), (&[5], &[6])], 4);
        assert_eq!(batch.tokens, [1, 2, 3, 0, 5, 0, 0, 0]);
        assert_eq!(batch.labels, [2, 3, 4, 0, 6, 0, 0, 0]);
        assert_eq!(batch.mask.unwrap(), [false, true, true, false, true, false, false, false]);
    }
}
