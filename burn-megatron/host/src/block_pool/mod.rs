//! Blocks of a paged KV cache: which are free, which sequences have, and which still hold keys and values of tokens that
//! may come again. Numbers alone: no tensors and no threads.
//!
//! This is vLLM's automatic prefix caching (<https://docs.vllm.ai/en/latest/design/prefix_caching.html>) of full blocks of
//! PagedAttention (Kwon et al., 2023). A full block is known by its tokens, by the block before it, and at the beginning by the
//! model: so by all tokens up to its end. Sequences that begin with the same tokens have the same blocks. What a sequence
//! still writes to is a block of its own, so nothing is ever copied on write.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// The blocks of a cache.
///
/// ```
/// use host::block_pool::BlockPool;
///
/// let mut pool = BlockPool::new(8, 2, true);
/// // Five tokens of model 0: two full blocks, and one that grows.
/// let first = pool.take(3).unwrap();
/// pool.keep((0, &[1, 2, 3, 4, 5]), &first, &mut 0);
/// // Another sequence begins with four of them, a third with two.
/// assert_eq!(pool.find(0, &[1, 2, 3, 4, 9]), first[..2]);
/// assert_eq!(pool.find(0, &[1, 2, 9, 9, 9]), first[..1]);
/// // The last token is never found: its logits are needed. Nor are another model's.
/// assert_eq!(pool.find(0, &[1, 2, 3, 4]), first[..1]);
/// assert!(pool.find(1, &[1, 2, 3, 4, 5]).is_empty());
/// // Of an ended sequence they stay until the memory is needed.
/// pool.give_back(&first);
/// assert_eq!((pool.available(), pool.find(0, &[1, 2, 3, 4, 5]).len()), (8, 2));
/// pool.take(8).unwrap();
/// assert!(pool.find(0, &[1, 2, 3, 4, 5]).is_empty());
/// ```
#[derive(Clone, Debug)]
pub struct BlockPool {
    block_size: usize,
    shares: bool,
    blocks: Vec<Block>,
    /// Those without a content and without a sequence.
    free: Vec<u32>,
    /// Those with a content and without a sequence, by the time since when: the one to give away first is the first.
    idle: BTreeMap<u64, u32>,
    /// Contents are compared, not their hashes.
    known: HashMap<Arc<Content>, u32>,
    /// Counts what becomes idle and what becomes known.
    clock: u64,
}

#[derive(Clone, Debug, Default)]
struct Block {
    /// Sequences that have it.
    sequences: usize,
    /// What it holds, with a number that no other content ever has.
    content: Option<(u64, Arc<Content>)>,
    idle_since: u64,
}

/// What a full block holds the keys and values of.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Content {
    before: Before,
    tokens: Box<[i64]>,
}

/// What is before a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Before {
    /// Nothing: the model with this number begins here.
    Start(usize),
    /// The content with this number.
    Content(u64),
}

impl BlockPool {
    /// `num_blocks` free blocks of `block_size` positions. Without `shares` nothing is kept, and nothing found.
    pub fn new(num_blocks: usize, block_size: usize, shares: bool) -> Self {
        Self {
            block_size,
            shares,
            blocks: vec![Block::default(); num_blocks],
            free: (0..num_blocks as u32).rev().collect(),
            idle: BTreeMap::new(),
            known: HashMap::new(),
            clock: 0,
        }
    }

    /// Blocks that no sequence has. Some may hold what can still be found.
    pub fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    /// The blocks that hold the longest known beginning of a sequence of `tokens` of a `model`, without its last token.
    /// Nobody has them yet: [`share`](Self::share) follows, before anything is taken.
    pub fn find(&self, model: usize, tokens: &[i64]) -> Vec<u32> {
        let (mut before, mut found) = (Before::Start(model), Vec::new());
        if !self.shares {
            return found;
        }
        for tokens in tokens[..tokens.len().saturating_sub(1)].chunks_exact(self.block_size) {
            let Some(&block) = self.known.get(&Content { before, tokens: tokens.into() }) else { break };
            let Some(next) = self.after(block) else { break };
            found.push(block);
            before = next;
        }
        found
    }

    /// How many of these blocks no sequence has: sharing them leaves so many fewer available.
    pub fn idle_among(&self, blocks: &[u32]) -> usize {
        blocks.iter().filter(|block| self.blocks[**block as usize].sequences == 0).count()
    }

    /// One more sequence has these blocks, which were found.
    pub fn share(&mut self, blocks: &[u32]) {
        for &block in blocks {
            let of = &mut self.blocks[block as usize];
            if of.sequences == 0 {
                self.idle.remove(&of.idle_since);
            }
            of.sequences += 1;
        }
    }

    /// So many blocks for a sequence, first those that hold nothing, then the longest idle ones, of which nothing is found
    /// any more. `None` if there are not so many, and nothing changes.
    pub fn take(&mut self, count: usize) -> Option<Vec<u32>> {
        (count <= self.available()).then(|| (0..count).map_while(|_| self.take_one()).collect())
    }

    fn take_one(&mut self) -> Option<u32> {
        let block = match self.free.pop() {
            Some(block) => block,
            None => self.idle.pop_first()?.1,
        };
        let of = &mut self.blocks[block as usize];
        if let Some((_, content)) = of.content.take() {
            self.known.remove(&content);
        }
        of.sequences = 1;
        Some(block)
    }

    /// From now on the full blocks of a sequence can be found: `blocks` hold the keys and values of all `tokens` of a model.
    /// The first `kept` of them were kept before; those that are now are counted.
    ///
    /// A block with a content that another block has already is not kept, nor is one behind such a block.
    pub fn keep(&mut self, (model, tokens): (usize, &[i64]), blocks: &[u32], kept: &mut usize) {
        if !self.shares {
            return;
        }
        for (index, tokens) in tokens.chunks_exact(self.block_size).enumerate().skip(*kept) {
            *kept = index + 1;
            let before = match index.checked_sub(1) {
                None => Some(Before::Start(model)),
                Some(before) => self.after(blocks[before]),
            };
            let Some(before) = before else { continue };
            let content = Arc::new(Content { before, tokens: tokens.into() });
            if !self.known.contains_key(&content) {
                let number = self.tick();
                self.known.insert(Arc::clone(&content), blocks[index]);
                self.blocks[blocks[index] as usize].content = Some((number, content));
            }
        }
    }

    /// A sequence has these blocks, all of its own in order, no longer. Those that can be found stay, the last one to be given
    /// away first: what is behind a block that is not found is never found.
    pub fn give_back(&mut self, blocks: &[u32]) {
        for &block in blocks.iter().rev() {
            let now = self.tick();
            let of = &mut self.blocks[block as usize];
            of.sequences -= 1;
            match (of.sequences, &of.content) {
                (0, None) => self.free.push(block),
                (0, Some(_)) => {
                    of.idle_since = now;
                    self.idle.insert(now, block);
                }
                _ => {}
            }
        }
    }

    /// What a block behind this one has before it, if this one can be found.
    fn after(&self, block: u32) -> Option<Before> {
        self.blocks[block as usize].content.as_ref().map(|(number, _)| Before::Content(*number))
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }
}
