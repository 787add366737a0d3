//! The new tokens of several sequences, read in one pass. Numbers alone.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Of which of its tokens a chunk gives logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outputs {
    /// The last one.
    Last,
    /// All of them.
    All,
}

/// New tokens of one sequence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chunk {
    /// One token for each of the positions.
    pub tokens: Vec<i64>,
    /// The positions of the tokens in their sequence; keys and values of all earlier ones are in the cache.
    pub positions: Range<usize>,
    /// The blocks of the sequence, in order, at least up to the last of the positions.
    pub blocks: Vec<u32>,
    /// Which logits are wanted.
    pub outputs: Outputs,
}

impl Chunk {
    /// The places in the cache of some of the sequence's positions.
    pub(super) fn slots(&self, positions: Range<usize>, block_size: usize) -> impl Iterator<Item = i64> {
        positions.map(move |position| {
            i64::from(self.blocks[position / block_size]) * block_size as i64 + (position % block_size) as i64
        })
    }

    /// The places of the new tokens.
    pub(super) fn new_slots(&self, block_size: usize) -> impl Iterator<Item = i64> {
        self.slots(self.positions.clone(), block_size)
    }
}

/// What a model reads in one pass with [`extend`](crate::CausalLm::extend): tokens of several sequences, one
/// after the other as one long sequence. Chunks of one token that come before all longer ones are computed together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    chunks: Vec<Chunk>,
}

impl Step {
    /// A step of these chunks, of which none is empty.
    ///
    /// # Panics
    /// If there is no chunk, or one has no tokens or not one for each position.
    pub fn new(chunks: Vec<Chunk>) -> Self {
        assert!(!chunks.is_empty(), "a step reads at least one token");
        for Chunk { tokens, positions, .. } in &chunks {
            assert!(!tokens.is_empty() && tokens.len() == positions.len(), "{} tokens at {positions:?}", tokens.len());
        }
        Self { chunks }
    }

    /// In the order of the tokens.
    pub fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// All new tokens.
    pub fn tokens(&self) -> Vec<i64> {
        self.chunks.iter().flat_map(|chunk| &chunk.tokens).copied().collect()
    }

    /// Number of new tokens.
    pub fn len(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.tokens.len()).sum()
    }

    /// Never: a step reads at least one token.
    pub fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// The positions of the tokens, by chunk.
    pub fn positions(&self) -> Vec<Range<usize>> {
        self.chunks.iter().map(|chunk| chunk.positions.clone()).collect()
    }

    /// Indices of the tokens whose logits are wanted.
    pub fn outputs(&self) -> Vec<usize> {
        let (mut first, mut outputs) = (0, Vec::new());
        for chunk in &self.chunks {
            let end = first + chunk.tokens.len();
            outputs.extend(match chunk.outputs {
                Outputs::Last => end - 1..end,
                Outputs::All => first..end,
            });
            first = end;
        }
        outputs
    }

    /// The chunks in groups that can be computed as a batch: single tokens that follow others of their sequences and each
    /// other, and every other chunk alone.
    pub(crate) fn alike(&self) -> impl Iterator<Item = &[Chunk]> {
        let is_next = |chunk: &Chunk| chunk.tokens.len() == 1 && chunk.positions.start > 0;
        self.chunks.chunk_by(move |a, b| is_next(a) && is_next(b))
    }

    pub(super) fn leading_single_tokens(&self) -> usize {
        self.chunks.iter().take_while(|chunk| chunk.tokens.len() == 1).count()
    }

    pub(super) fn check(&self, num_blocks: usize, block_size: usize) {
        for Chunk { positions, blocks, .. } in &self.chunks {
            let room = blocks.len() * block_size;
            assert!(positions.end <= room, "position {} of a sequence with blocks for {room}", positions.end);
            let known = blocks.iter().all(|block| (*block as usize) < num_blocks);
            assert!(known, "blocks {blocks:?} of a cache with {num_blocks}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(positions: Range<usize>, blocks: &[u32], outputs: Outputs) -> Chunk {
        let tokens = positions.clone().map(|position| position as i64 + 10).collect();
        Chunk { tokens, positions, blocks: blocks.to_vec(), outputs }
    }

    #[test]
    fn tokens_are_one_after_the_other() {
        let step = Step::new(vec![
            chunk(5..6, &[2, 0], Outputs::Last),
            chunk(0..3, &[1], Outputs::Last),
            chunk(4..6, &[3, 4], Outputs::All),
        ]);
        assert_eq!(step.tokens(), [15, 10, 11, 12, 14, 15]);
        assert_eq!((step.outputs(), step.leading_single_tokens(), step.len()), (vec![0, 3, 4, 5], 1, 6));
        let slots: Vec<i64> = step.chunks().iter().flat_map(|chunk| chunk.new_slots(4)).collect();
        assert_eq!(slots, [1, 4, 5, 6, 16, 17]);
        step.check(5, 4);
    }

    #[test]
    #[should_panic(expected = "position 5 of a sequence with blocks for 4")]
    fn a_sequence_without_room_is_refused() {
        Step::new(vec![chunk(4..5, &[0], Outputs::Last)]).check(5, 4);
    }
}
