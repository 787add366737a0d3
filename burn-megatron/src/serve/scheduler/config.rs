//! Sizes of a scheduler.

use thiserror::Error;

/// Sizes of a scheduler, by vLLM's names.
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
    /// Sequences of a model that begin with the same tokens have the same blocks for them, and full blocks of ended sequences
    /// stay until their memory is needed. Left out where a model cannot do it
    /// ([`CausalLm::shares_prefixes`](models::CausalLm::shares_prefixes)).
    pub enable_prefix_caching: bool,
    /// Decode steps are not recorded as CUDA graphs ([`PagedKvCache::eager`](models::PagedKvCache::eager)).
    pub enforce_eager: bool,
}

impl Default for SchedulerConfig {
    /// 64 sequences, 2048 tokens a step and a sequence, blocks of 64 positions, as many as all sequences need, and shared
    /// prefixes.
    fn default() -> Self {
        let (max_num_seqs, max_model_len, block_size) = (64, 2048, 64);
        let num_blocks = max_num_seqs * max_model_len / block_size;
        Self {
            max_num_seqs,
            max_num_batched_tokens: 2048,
            max_model_len,
            block_size,
            num_blocks,
            enable_prefix_caching: true,
            enforce_eager: false,
        }
    }
}

const MOST_BLOCKS: usize = u32::MAX as usize;

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
        for (key, value) in [("max-num-seqs", max_num_seqs), ("block-size", block_size), ("num-blocks", num_blocks)] {
            if value == 0 {
                return refuse(key, value, "at least one is needed", 1);
            }
        }
        if num_blocks > MOST_BLOCKS {
            return refuse("num-blocks", num_blocks, "a block has a number of 32 bits", MOST_BLOCKS);
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

    pub(super) fn blocks_of(&self, positions: usize) -> usize {
        positions.div_ceil(self.block_size)
    }
}
