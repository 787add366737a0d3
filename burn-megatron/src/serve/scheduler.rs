//! Which sequences a step reads, and which blocks of the cache they have. Numbers alone: no tokens, tensors or threads.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::ops::Range;

use thiserror::Error;

/// Sizes of a scheduler, by vLLM's names.
///
/// ```
/// use burn_megatron::serve::{Scheduler, SchedulerConfig};
///
/// let config = SchedulerConfig { max_num_seqs: 4, num_blocks: 64, ..SchedulerConfig::default() };
/// let mut scheduler = Scheduler::new(config)?;
/// scheduler.add(7, 100);
/// // The whole prompt in one step, then one token at a time.
/// assert_eq!(scheduler.schedule()[0].positions, 0..100);
/// scheduler.append(7);
/// assert_eq!(scheduler.schedule()[0].positions, 100..101);
/// scheduler.remove(7);
/// assert!(scheduler.schedule().is_empty());
/// # Ok::<(), burn_megatron::serve::SchedulerError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Most sequences that run at a time.
    pub max_num_seqs: usize,
    /// Most tokens of a step: a longer prompt is read in several steps.
    pub max_num_batched_tokens: usize,
    /// Most positions of a sequence, prompt and new tokens together.
    pub max_model_len: usize,
    /// Positions of a block.
    pub block_size: usize,
    /// Blocks of the cache.
    pub num_blocks: usize,
    /// Decode steps are not recorded as CUDA graphs ([`PagedKvCache::eager`](models::PagedKvCache::eager)).
    pub enforce_eager: bool,
}

impl Default for SchedulerConfig {
    /// 64 sequences, 2048 tokens a step and a sequence, blocks of 64 positions, as many as all sequences need.
    fn default() -> Self {
        let (max_num_seqs, max_model_len, block_size) = (64, 2048, 64);
        let num_blocks = max_num_seqs * max_model_len / block_size;
        Self { max_num_seqs, max_num_batched_tokens: 2048, max_model_len, block_size, num_blocks, enforce_eager: false }
    }
}

/// A size of which nothing can come.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{key} {value}: {why}; nearest legal: {nearest}")]
pub struct SchedulerError {
    /// Its name.
    pub key: &'static str,
    /// Its value.
    pub value: usize,
    /// What is wrong.
    pub why: &'static str,
    /// The closest value that would do.
    pub nearest: usize,
}

impl SchedulerConfig {
    /// Whether every sequence that fits `max-model-len` can be finished. The error names the size.
    pub fn check(&self) -> Result<(), SchedulerError> {
        let refuse = |key, value, why, nearest| Err(SchedulerError { key, value, why, nearest });
        let Self { max_num_seqs, max_num_batched_tokens, max_model_len, block_size, num_blocks, .. } = *self;
        for (key, value) in [("max-num-seqs", max_num_seqs), ("block-size", block_size)] {
            if value == 0 {
                return refuse(key, value, "at least one is needed", 1);
            }
        }
        if max_model_len < 2 {
            return refuse("max-model-len", max_model_len, "a prompt and a new token have two positions", 2);
        }
        if max_num_batched_tokens < max_num_seqs {
            let why = "each of --max-num-seqs sequences reads a token in a step";
            return refuse("max-num-batched-tokens", max_num_batched_tokens, why, max_num_seqs);
        }
        let room = num_blocks.saturating_mul(block_size);
        if room < max_model_len {
            let why = "the cache has no blocks for so many positions of one sequence";
            return refuse("max-model-len", max_model_len, why, room.max(2));
        }
        Ok(())
    }

    fn blocks_of(&self, positions: usize) -> usize {
        positions.div_ceil(self.block_size)
    }
}

/// What a step reads of one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scheduled {
    /// The sequence.
    pub id: u64,
    /// The positions of the tokens that are read.
    pub positions: Range<usize>,
    /// The blocks of the sequence, in order.
    pub blocks: Vec<u32>,
    /// Whether these are its last tokens, so that the next one can be chosen.
    pub is_last: bool,
}

/// A sequence, waiting or running.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Sequence {
    id: u64,
    /// Its tokens so far.
    len: usize,
    /// Tokens whose keys and values are in the cache.
    computed: usize,
    blocks: Vec<u32>,
}

/// First come, first served. A sequence takes blocks as it grows. When there are none left, the one that came last gives
/// its blocks up and waits, at the front, to be read again (vLLM's preemption by recomputation).
#[derive(Clone, Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    free: Vec<u32>,
    waiting: VecDeque<Sequence>,
    /// In the order in which they came.
    running: Vec<Sequence>,
    preemptions: u64,
    /// The first blocks of sequences that have given theirs up since they were last asked for.
    released: Vec<u32>,
}

impl Scheduler {
    /// A scheduler with all blocks free.
    pub fn new(config: SchedulerConfig) -> Result<Self, SchedulerError> {
        config.check()?;
        let free = (0..config.num_blocks as u32).rev().collect();
        Ok(Self { config, free, waiting: VecDeque::new(), running: Vec::new(), preemptions: 0, released: Vec::new() })
    }

    /// Its sizes.
    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// Sequences that wait.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Sequences that run.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Blocks that no sequence has.
    pub fn free_blocks(&self) -> usize {
        self.free.len()
    }

    /// How often a sequence had to give its blocks up.
    pub fn preemptions(&self) -> u64 {
        self.preemptions
    }

    /// Takes a sequence of `len` tokens, at least one and fewer than `max-model-len`, under an `id` that no other has.
    pub fn add(&mut self, id: u64, len: usize) {
        self.waiting.push_back(Sequence { id, len, computed: 0, blocks: Vec::new() });
    }

    /// A sequence has one more token.
    pub fn append(&mut self, id: u64) {
        let all = self.running.iter_mut().chain(&mut self.waiting);
        all.filter(|sequence| sequence.id == id).for_each(|sequence| sequence.len += 1);
    }

    /// Forgets a sequence: it has ended, or nobody wants more of it.
    pub fn remove(&mut self, id: u64) {
        self.waiting.retain(|sequence| sequence.id != id);
        if let Some(at) = self.running.iter().position(|sequence| sequence.id == id) {
            let sequence = self.running.remove(at);
            self.take_back(sequence.blocks);
        }
    }

    /// The first blocks of the sequences that have ended or were preempted since the last call: recurrent states, which are
    /// kept under them, belong to nobody any more ([`PagedKvCache::release`](models::PagedKvCache::release)). One may be that
    /// of a sequence that the last step began to read.
    pub fn take_released(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.released)
    }

    fn take_back(&mut self, blocks: Vec<u32>) {
        self.released.extend(blocks.first());
        self.free.extend(blocks);
    }

    /// The next step, empty if there is nothing to read; its tokens count as read. Sequences that read one token come
    /// first.
    pub fn schedule(&mut self) -> Vec<Scheduled> {
        let (mut budget, mut step) = (self.config.max_num_batched_tokens, Vec::new());
        let (mut at, before) = (0, self.preemptions);
        while at < self.running.len() {
            let new = self.new_tokens(&self.running[at], budget);
            if new > 0 && self.make_room(at, new) {
                budget -= new;
                step.push(read(&mut self.running[at], new));
            }
            at += 1;
        }
        // What was preempted in this step is not read again in it.
        while before == self.preemptions && self.running.len() < self.config.max_num_seqs && budget > 0 {
            let Some(next) = self.waiting.front() else { break };
            // With the token that follows: a sequence that starts can read at least once more.
            if self.config.blocks_of((next.len + 1).min(self.config.max_model_len)) > self.free.len() {
                break;
            }
            let Some(mut next) = self.waiting.pop_front() else { break };
            let new = self.new_tokens(&next, budget);
            self.take_blocks(&mut next, new);
            budget -= new;
            step.push(read(&mut next, new));
            self.running.push(next);
        }
        step.sort_by_key(|scheduled| scheduled.positions.len() > 1);
        step
    }

    fn new_tokens(&self, sequence: &Sequence, budget: usize) -> usize {
        (sequence.len - sequence.computed).min(budget)
    }

    /// Blocks for `new` more tokens of the running sequence `at`, if need be those of younger ones. False if it had to
    /// give up its own.
    fn make_room(&mut self, at: usize, new: usize) -> bool {
        let needed = self.config.blocks_of(self.running[at].computed + new);
        while needed > self.running[at].blocks.len() + self.free.len() {
            let Some(mut youngest) = self.running.pop() else { return false };
            let blocks = std::mem::take(&mut youngest.blocks);
            self.take_back(blocks);
            youngest.computed = 0;
            self.waiting.push_front(youngest);
            self.preemptions += 1;
            if self.running.len() == at {
                return false;
            }
        }
        let mut sequence = self.running[at].clone();
        self.take_blocks(&mut sequence, new);
        self.running[at] = sequence;
        true
    }

    fn take_blocks(&mut self, sequence: &mut Sequence, new: usize) {
        let missing = self.config.blocks_of(sequence.computed + new).saturating_sub(sequence.blocks.len());
        let rest = self.free.len().saturating_sub(missing);
        sequence.blocks.extend(self.free.drain(rest..).rev());
    }
}

fn read(sequence: &mut Sequence, new: usize) -> Scheduled {
    let positions = sequence.computed..sequence.computed + new;
    sequence.computed = positions.end;
    let (id, blocks) = (sequence.id, sequence.blocks.clone());
    Scheduled { id, is_last: positions.end == sequence.len, positions, blocks }
}
