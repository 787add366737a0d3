//! The sequences of the first rank: their tokens, what is asked of them and who waits for them. No tensors.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use models::layers::paged::{Chunk, Outputs, Step};
use serde::{Deserialize, Serialize};

use super::queue::{Ended, OnEvent, Statistics, Submitted, Wanted};
use super::request::{Event, Finish, Request};
use super::scheduler::{Scheduled, Scheduler};
use crate::generate::{Choice, Chosen, NoChoice, TextRules, TokenLogprobs};
use crate::logits::Seen;

/// What one model reads in a step.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Pass {
    /// The model's number.
    pub model: usize,
    pub step: Step,
    /// The sequence of each chunk.
    ids: Vec<u64>,
}

/// A line of a step's logits: of which sequence, and after which of its positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    id: u64,
    position: usize,
}

struct Sequence {
    request: Request,
    rules: Option<Arc<TextRules>>,
    on_event: OnEvent,
    wanted: Wanted,
    /// Prompt and new tokens.
    tokens: Vec<i64>,
    /// Tokens of the prompt that were not read, because the cache had them; not known before its first step.
    cached: Option<usize>,
    prompt_logprobs: Vec<TokenLogprobs>,
}

impl Sequence {
    fn new_tokens(&self) -> usize {
        self.tokens.len() - self.request.prompt.len()
    }

    /// Log-probabilities of the prompt are wanted, and not all known.
    fn reads_logprobs(&self) -> bool {
        self.request.prompt_logprobs && self.new_tokens() == 0
    }

    fn choice(&self, position: usize) -> Choice {
        let Request { sampling, logprobs, .. } = self.request;
        match self.tokens.get(position + 1) {
            None => Choice::next(sampling, &self.rules, self.new_tokens(), logprobs),
            // After a preemption some are known.
            Some(&token) if self.reads_logprobs() && position >= self.prompt_logprobs.len() => {
                Choice::Known { token, top: logprobs.unwrap_or(0) }
            }
            Some(_) => Choice::None,
        }
    }
}

pub(super) struct Sequences {
    scheduler: Scheduler,
    all: BTreeMap<u64, Sequence>,
    next_id: u64,
    totals: Statistics,
}

impl Sequences {
    pub fn new(scheduler: Scheduler) -> Self {
        Self { scheduler, all: BTreeMap::new(), next_id: 0, totals: Statistics::default() }
    }

    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub fn statistics(&self) -> Statistics {
        let num_blocks = self.scheduler.config().num_blocks;
        Statistics {
            running: self.scheduler.running(),
            waiting: self.scheduler.waiting(),
            used_blocks: num_blocks - self.scheduler.free_blocks(),
            num_blocks,
            preemptions: self.scheduler.preemptions(),
            ..self.totals
        }
    }

    pub fn add(&mut self, Submitted { request, on_event, wanted }: Submitted) {
        let tokens = request.prompt.clone();
        match request.prompt_logprobs {
            true => self.scheduler.add_to_read_all(self.next_id, request.model, &tokens),
            false => self.scheduler.add(self.next_id, request.model, &tokens),
        }
        let Request { prompt, stop_tokens, max_tokens, .. } = &request;
        let seen = || Seen::new(prompt, prompt, stop_tokens, *max_tokens);
        let rules = TextRules::new(&request.processors, &request.sampling, seen);
        let (cached, prompt_logprobs) = (None, Vec::new());
        let sequence = Sequence { request, rules, on_event, wanted, tokens, cached, prompt_logprobs };
        self.all.insert(self.next_id, sequence);
        self.next_id += 1;
    }

    pub fn fail_all(&mut self, why: &str) {
        let ids: Vec<u64> = self.all.keys().copied().collect();
        ids.into_iter().for_each(|id| self.fail(id, Event::Failed(why.into())));
    }

    /// What each model reads next, without those that nobody waits for any more.
    pub fn next_passes(&mut self) -> Vec<Pass> {
        let unwanted = self.all.iter().filter_map(|(id, of)| Some((*id, of.wanted.ended()?)));
        for (id, ended) in unwanted.collect::<Vec<_>>() {
            self.remove(id);
            match ended {
                Ended::Complete => self.totals.stopped += 1,
                Ended::Cancelled => self.totals.cancelled += 1,
            }
        }
        let mut chunks: BTreeMap<usize, (Vec<u64>, Vec<Chunk>)> = BTreeMap::new();
        for Scheduled { id, positions, blocks, .. } in self.scheduler.schedule() {
            let Some(sequence) = self.all.get_mut(&id) else { continue };
            if sequence.cached.is_none() {
                sequence.cached = Some(positions.start);
                if self.scheduler.config().enable_prefix_caching && !sequence.request.prompt_logprobs {
                    self.totals.prefix_cache_queries += sequence.tokens.len() as u64;
                    self.totals.prefix_cache_hits += positions.start as u64;
                }
            }
            let outputs = if sequence.reads_logprobs() { Outputs::All } else { Outputs::Last };
            let tokens = sequence.tokens[positions.clone()].to_vec();
            let (ids, chunks) = chunks.entry(sequence.request.model).or_default();
            ids.push(id);
            chunks.push(Chunk { tokens, positions, blocks, outputs });
        }
        self.totals.steps += u64::from(!chunks.is_empty());
        let pass = |(model, (ids, chunks))| Pass { model, step: Step::new(chunks), ids };
        chunks.into_iter().map(pass).collect()
    }

    /// See [`Scheduler::take_released`].
    pub fn take_released(&mut self) -> Vec<u32> {
        self.scheduler.take_released()
    }

    /// What is wanted of each line of a pass's logits.
    pub fn choices(&self, pass: &Pass) -> Vec<(Place, Choice)> {
        let of_chunk = |(id, chunk): (&u64, &Chunk)| {
            let (id, last) = (*id, chunk.positions.end - 1);
            let first = if chunk.outputs == Outputs::All { chunk.positions.start } else { last };
            let of = |position| self.all.get(&id).map_or(Choice::None, |sequence| sequence.choice(position));
            (first..=last).map(|position| (Place { id, position }, of(position))).collect::<Vec<_>>()
        };
        pass.ids.iter().zip(pass.step.chunks()).flat_map(of_chunk).collect()
    }

    /// Takes what was chosen at a place, and tells who waits for it.
    pub fn take(&mut self, Place { id, position }: Place, choice: Choice, chosen: Result<Chosen, NoChoice>) {
        let Some(sequence) = self.all.get_mut(&id) else { return };
        let (token, logprobs) = match chosen {
            Ok(chosen) => chosen,
            Err(why) => {
                let is_refused = matches!(why, NoChoice::Forbidden(_));
                let why = why.after(position + 1).to_string();
                return self.fail(id, if is_refused { Event::Refused(why) } else { Event::Failed(why) });
            }
        };
        match &choice {
            Choice::None => return,
            Choice::Known { .. } => return sequence.prompt_logprobs.extend(logprobs),
            Choice::Next { .. } => {}
        }
        // The sequence alone has its rules again.
        drop(choice);
        if sequence.new_tokens() == 0 {
            self.totals.prompt_tokens += sequence.request.prompt.len() as u64;
            if let Some(cached) = sequence.cached.filter(|cached| *cached > 0) {
                // Whether somebody listens is known with the token.
                let _ = (sequence.on_event)(Event::Cached(cached));
            }
            if sequence.request.prompt_logprobs {
                let all = std::mem::take(&mut sequence.prompt_logprobs);
                let _ = (sequence.on_event)(Event::Prompt(all));
            }
        }
        sequence.tokens.push(token);
        TextRules::push(&mut sequence.rules, token);
        self.totals.generation_tokens += 1;
        let finish = match () {
            () if sequence.request.stop_tokens.contains(&token) => Some(Finish::Stop),
            () if sequence.new_tokens() >= sequence.request.max_tokens => Some(Finish::Length),
            () => None,
        };
        let told = (sequence.on_event)(Event::Token { token, logprobs, finish });
        match finish {
            Some(Finish::Stop) => self.totals.stopped += 1,
            Some(Finish::Length) => self.totals.full += 1,
            // Whose text is complete has no ear for a token that was on its way either.
            None if told == ControlFlow::Break(()) => match sequence.wanted.ended() {
                Some(Ended::Complete) => self.totals.stopped += 1,
                Some(Ended::Cancelled) | None => self.totals.cancelled += 1,
            },
            None => return self.scheduler.append(id, token),
        }
        self.remove(id);
    }

    fn fail(&mut self, id: u64, why: Event) {
        if let Some(sequence) = self.all.get_mut(&id) {
            // It ends whether or not somebody listens.
            let _ = (sequence.on_event)(why);
            self.totals.failed += 1;
        }
        self.remove(id);
    }

    fn remove(&mut self, id: u64) {
        self.scheduler.remove(id);
        self.all.remove(&id);
    }
}
