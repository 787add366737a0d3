//! Which sequences a step reads, and which blocks of the cache they have. No tensors or threads.

mod config;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::ops::Range;

pub use self::config::{SchedulerConfig, SchedulerError};
use crate::block_pool::BlockPool;

/// What a step reads of one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scheduled {
    /// The sequence.
    pub id: u64,
    /// The positions of the tokens that are read. A sequence that starts behind 0 has all positions before from others.
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
    model: usize,
    /// Its tokens so far.
    tokens: Vec<i64>,
    /// All of its tokens are read, whatever the cache holds.
    reads_all: bool,
    /// Tokens whose keys and values are in the cache.
    computed: usize,
    blocks: Vec<u32>,
    /// Full blocks that the pool knows of.
    kept: usize,
}

/// First come, first served. A sequence takes blocks as it grows. When there are none left, the one that came last gives
/// its blocks up and waits, at the front, to be read again (vLLM's preemption by recomputation). A sequence starts behind
/// the tokens that the cache holds ([`BlockPool`]).
///
/// ```
/// use burn_megatron::serve::{Scheduler, SchedulerConfig};
///
/// let config = SchedulerConfig { max_num_seqs: 4, num_blocks: 64, ..SchedulerConfig::default() };
/// let mut scheduler = Scheduler::new(config)?;
/// let prompt: Vec<i64> = (0..100).collect();
/// scheduler.add(7, 0, &prompt);
/// // The whole prompt in one step, then one token at a time.
/// assert_eq!(scheduler.schedule()[0].positions, 0..100);
/// scheduler.append(7, 5);
/// assert_eq!(scheduler.schedule()[0].positions, 100..101);
/// scheduler.remove(7);
/// assert!(scheduler.schedule().is_empty());
/// // A block of 64 of its tokens is in the cache.
/// scheduler.add(8, 0, &prompt);
/// assert_eq!(scheduler.schedule()[0].positions, 64..100);
/// # Ok::<(), burn_megatron::serve::SchedulerError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    pool: BlockPool,
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
        let pool = BlockPool::new(config.num_blocks, config.block_size, config.enable_prefix_caching);
        Ok(Self { config, pool, waiting: VecDeque::new(), running: Vec::new(), preemptions: 0, released: Vec::new() })
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
        self.pool.available()
    }

    /// How often a sequence had to give its blocks up.
    pub fn preemptions(&self) -> u64 {
        self.preemptions
    }

    /// Takes a sequence of these tokens of a `model`, at least one and fewer than `max-model-len`, under an `id` that no other
    /// has.
    pub fn add(&mut self, id: u64, model: usize, tokens: &[i64]) {
        let (tokens, blocks) = (tokens.to_vec(), Vec::new());
        let sequence = Sequence { id, model, tokens, reads_all: false, computed: 0, blocks, kept: 0 };
        self.waiting.push_back(sequence);
    }

    /// The same for a sequence of which all tokens are read, whatever the cache holds: all of its logits are wanted.
    pub fn add_to_read_all(&mut self, id: u64, model: usize, tokens: &[i64]) {
        self.add(id, model, tokens);
        if let Some(added) = self.waiting.back_mut() {
            added.reads_all = true;
        }
    }

    /// A sequence has one more token.
    pub fn append(&mut self, id: u64, token: i64) {
        let all = self.running.iter_mut().chain(&mut self.waiting);
        all.filter(|sequence| sequence.id == id).for_each(|sequence| sequence.tokens.push(token));
    }

    /// Forgets a sequence: it has ended, or nobody wants more of it.
    pub fn remove(&mut self, id: u64) {
        self.waiting.retain(|sequence| sequence.id != id);
        if let Some(at) = self.running.iter().position(|sequence| sequence.id == id) {
            let mut sequence = self.running.remove(at);
            self.take_back(&mut sequence);
        }
    }

    /// The first blocks of the sequences that have ended or were preempted since the last call: recurrent states, which are
    /// kept under them, belong to nobody any more ([`PagedKvCache::release`](models::PagedKvCache::release)). One may be that
    /// of a sequence that the last step began to read.
    pub fn take_released(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.released)
    }

    fn take_back(&mut self, sequence: &mut Sequence) {
        keep(&mut self.pool, sequence);
        self.released.extend(sequence.blocks.first());
        self.pool.give_back(&sequence.blocks);
        (sequence.blocks, sequence.computed, sequence.kept) = (Vec::new(), 0, 0);
    }

    /// The next step, empty if there is nothing to read; its tokens count as read. Sequences that read one token come
    /// first.
    ///
    /// A sequence may begin with blocks that a longer chunk of the same step fills: a step writes the keys and values of all
    /// of its tokens before it reads any. Kernels for steps of single tokens do both at once, so what single tokens fill is
    /// found from the next step on.
    pub fn schedule(&mut self) -> Vec<Scheduled> {
        let (mut budget, mut step) = (self.config.max_num_batched_tokens, Vec::new());
        let (mut at, before) = (0, self.preemptions);
        self.running.iter_mut().for_each(|sequence| keep(&mut self.pool, sequence));
        while at < self.running.len() {
            let new = self.running[at].new_tokens(budget);
            if new > 0 && self.make_room(at, new) {
                budget -= new;
                step.push(self.read(at, new));
            }
            at += 1;
        }
        // What was preempted in this step is not read again in it.
        while before == self.preemptions && self.running.len() < self.config.max_num_seqs && budget > 0 {
            let Some(next) = self.waiting.pop_front() else { break };
            if let Err(next) = self.start(next, budget) {
                self.waiting.push_front(next);
                break;
            }
            let at = self.running.len() - 1;
            let new = self.running[at].new_tokens(budget);
            budget -= new;
            step.push(self.read(at, new));
        }
        step.sort_by_key(|scheduled| scheduled.positions.len() > 1);
        step
    }

    /// Runs a sequence that waits, behind what the cache holds of it; gives it back if there is no room.
    fn start(&mut self, mut next: Sequence, budget: usize) -> Result<(), Sequence> {
        let found = match next.reads_all {
            true => Vec::new(),
            false => self.pool.find(next.model, &next.tokens),
        };
        // With the token that follows: a sequence that starts can read at least once more.
        let needed = self.config.blocks_of((next.tokens.len() + 1).min(self.config.max_model_len)) - found.len();
        if needed + self.pool.idle_among(&found) > self.pool.available() {
            return Err(next);
        }
        self.pool.share(&found);
        next.computed = found.len() * self.config.block_size;
        next.blocks = found;
        let new = next.new_tokens(budget);
        self.running.push(next);
        self.take_blocks(self.running.len() - 1, new);
        Ok(())
    }

    /// Blocks for `new` more tokens of the running sequence `at`, if need be those of younger ones. False if it had to
    /// give up its own.
    fn make_room(&mut self, at: usize, new: usize) -> bool {
        let needed = self.config.blocks_of(self.running[at].computed + new);
        while needed > self.running[at].blocks.len() + self.pool.available() {
            let Some(mut youngest) = self.running.pop() else { return false };
            self.take_back(&mut youngest);
            self.waiting.push_front(youngest);
            self.preemptions += 1;
            if self.running.len() == at {
                return false;
            }
        }
        self.take_blocks(at, new);
        true
    }

    fn take_blocks(&mut self, at: usize, new: usize) {
        let sequence = &mut self.running[at];
        let missing = self.config.blocks_of(sequence.computed + new).saturating_sub(sequence.blocks.len());
        sequence.blocks.extend(self.pool.take(missing).expect("there is room"));
    }

    fn read(&mut self, at: usize, new: usize) -> Scheduled {
        let sequence = &mut self.running[at];
        let positions = sequence.computed..sequence.computed + new;
        sequence.computed = positions.end;
        if new > 1 {
            keep(&mut self.pool, sequence);
        }
        let (id, blocks) = (sequence.id, sequence.blocks.clone());
        Scheduled { id, is_last: positions.end == sequence.tokens.len(), positions, blocks }
    }
}

impl Sequence {
    fn new_tokens(&self, budget: usize) -> usize {
        (self.tokens.len() - self.computed).min(budget)
    }
}

/// The full blocks of a sequence can be found.
fn keep(pool: &mut BlockPool, sequence: &mut Sequence) {
    let Sequence { model, tokens, computed, blocks, kept, .. } = sequence;
    pool.keep((*model, &tokens[..*computed]), blocks, kept);
}
