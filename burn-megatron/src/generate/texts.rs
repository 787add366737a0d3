//! The texts of a batch, and the blocks of the cache that each has. No tensors.

use std::ops::Range;
use std::sync::Arc;

use models::layers::paged::{Chunk, Outputs};
use serde::{Deserialize, Serialize};

use super::TextRules;
use super::options::GenerateOptions;
use crate::block_pool::BlockPool;
use crate::logits::Seen;

/// Positions of a block of the cache.
pub(super) const BLOCK_SIZE: usize = 64;

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ended {
    /// It has as many tokens as asked for.
    Length,
    /// Its last token is one of the stop tokens.
    StopToken,
    /// The reader of the tokens wanted no more.
    Reader,
}

/// A text that is written.
pub(super) struct Text {
    /// Those of the prompt first.
    pub tokens: Vec<i64>,
    pub prompt: usize,
    pub seed: u64,
    pub rules: Option<Arc<TextRules>>,
    /// The tokens in the cache.
    pub read: Range<usize>,
    /// Most tokens in the cache.
    capacity: usize,
    blocks: Vec<u32>,
    pub ended: Option<Ended>,
}

impl Text {
    /// Texts of the prompts alone, each with the seed of its draws, and how many blocks they have.
    ///
    /// All prompts are read in one step, which writes all keys and values of a layer before it reads any: so a text begins
    /// behind the full blocks that those before it in the batch have in common with it.
    pub fn all(prompts: &[(&[i64], u64)], options: &GenerateOptions) -> (Vec<Self>, u32) {
        let blocks_of = |prompt: usize| options.positions(prompt).div_ceil(BLOCK_SIZE);
        let most = prompts.iter().map(|(prompt, _)| blocks_of(prompt.len())).sum();
        let mut pool = BlockPool::new(most, BLOCK_SIZE, options.enable_prefix_caching);
        let text = |(prompt, seed): &(&[i64], u64)| {
            let capacity = options.positions(prompt.len());
            // What a window moves on from is overwritten.
            let is_whole = capacity + 1 >= prompt.len().saturating_add(options.max_new_tokens);
            let shared = if is_whole { pool.find(0, prompt) } else { Vec::new() };
            pool.share(&shared);
            let own = pool.take(blocks_of(prompt.len()) - shared.len()).expect("there are blocks for all texts");
            let (cached, blocks) = (shared.len() * BLOCK_SIZE, [shared, own].concat());
            if is_whole {
                pool.keep((0, prompt), &blocks, &mut 0);
            }
            let seen = || Seen::new(prompt, prompt, &options.stop_tokens, options.max_new_tokens);
            let rules = TextRules::new(&options.processors, &options.sampling, seen);
            let unread = prompt.len() - prompt.len().min(capacity);
            let (tokens, prompt, read) = (prompt.to_vec(), prompt.len(), unread..unread + cached);
            Self { tokens, prompt, seed: *seed, rules, read, capacity, blocks, ended: None }
        };
        let texts = prompts.iter().map(text).collect();
        (texts, (most - pool.available()) as u32)
    }

    /// Another token.
    pub fn push(&mut self, token: i64) {
        self.tokens.push(token);
        TextRules::push(&mut self.rules, token);
    }

    /// What is read next: what is not in the cache, or, if there is no room for it, the last half window.
    pub fn next_chunk(&mut self, options: &GenerateOptions) -> Chunk {
        let len = self.tokens.len();
        if len - self.read.start > self.capacity {
            let start = len - (options.window.unwrap_or(self.capacity) / 2).max(1);
            self.read = start..start;
        }
        let Range { start, end } = self.read.clone();
        self.read.end = len;
        Chunk {
            tokens: self.tokens[end..].to_vec(),
            positions: end - start..len - start,
            blocks: self.blocks.clone(),
            outputs: Outputs::Last,
        }
    }
}
