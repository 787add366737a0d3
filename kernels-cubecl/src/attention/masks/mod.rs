//! Masks of single scores and of single weights, a bit each: 32 of a row in a word.
//!
//! The forward kernel has rows of queries and the backward kernel rows of keys, so each mask is stored both ways.
mod kernel;
mod pack;

pub use kernel::{BitRows, BitRowsCompilationArg, BitRowsLaunch, RowMasks, replace, row_masks};
pub use pack::{pack_hidden, pack_kept};

use cubecl::prelude::*;
use cubecl::server::Handle;

/// Bits of a word.
const WORD: usize = 32;

/// Which scores are hidden, or which weights are kept: a bit for each element of `[batch, heads, queries, keys]`, of
/// which the first three dimensions may be one for all.
#[derive(Clone, Debug)]
pub struct BitMask {
    /// `u32 [batch, heads, queries, words]`, the bits of 32 keys in a word.
    pub(super) by_query: Handle,
    /// `u32 [batch, heads, keys, words]`, the bits of 32 queries in a word.
    pub(super) by_key: Handle,
    /// The dimensions.
    pub(super) shape: [usize; 4],
}

/// Masks of a call: bits for single scores, and for single weights of the softmax.
#[derive(Clone, Copy, Debug, Default)]
pub struct ScoreMasks<'a> {
    /// A set bit hides a score.
    pub hidden: Option<&'a BitMask>,
    /// A set bit keeps a weight, times the factor; others are dropped.
    pub kept: Option<(&'a BitMask, f32)>,
}

impl ScoreMasks<'_> {
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.hidden.is_none() && self.kept.is_none()
    }
}

impl BitMask {
    /// Memory for a mask of this shape.
    fn empty(client: &Client, shape: [usize; 4]) -> Self {
        let [by_query, by_key] =
            [Self::query_words(shape), Self::key_words(shape)].map(|words| client.empty(4 * words));
        Self { by_query, by_key, shape }
    }

    fn query_words([batch, heads, queries, keys]: [usize; 4]) -> usize {
        batch * heads * queries * keys.div_ceil(WORD)
    }

    fn key_words([batch, heads, queries, keys]: [usize; 4]) -> usize {
        batch * heads * keys * queries.div_ceil(WORD)
    }

    /// Whether the mask is one of scores `[batch, heads, queries, keys]`.
    pub(super) fn fits(&self, scores: [usize; 4]) -> bool {
        let is_part = |dim: usize| self.shape[dim] == scores[dim] || self.shape[dim] == 1;
        (0..3).all(is_part) && self.shape[3] == scores[3]
    }

    /// The words of rows of queries, and where a row is.
    pub(super) fn of_queries(&self) -> (BufferArg, BitRowsLaunch) {
        let [batch, heads, queries, keys] = self.shape;
        let words = keys.div_ceil(WORD);
        let rows = rows([batch, heads, queries], words, words);
        (super::flat(&self.by_query, Self::query_words(self.shape)), rows)
    }

    /// Those of rows of keys.
    pub(super) fn of_keys(&self) -> (BufferArg, BitRowsLaunch) {
        let [batch, heads, queries, keys] = self.shape;
        let words = queries.div_ceil(WORD);
        // All bits of a row are the same if all queries have one mask: its first word is the others too.
        let last = if queries == 1 { 1 } else { words };
        (super::flat(&self.by_key, Self::key_words(self.shape)), rows([batch, heads, keys], words, last))
    }
}

/// In place of the words of a mask that there is not.
pub(super) fn no_mask(unread: &Handle) -> (BufferArg, BitRowsLaunch) {
    (super::flat(unread, 1), BitRowsLaunch::new(0, 0, 0, 0, 0))
}

/// Where rows of so many words are. Words from the last of `distinct` on are that.
fn rows([batch, heads, rows]: [usize; 3], words: usize, distinct: usize) -> BitRowsLaunch {
    let stride = |size: usize, stride: usize| if size == 1 { 0 } else { stride as u32 };
    BitRowsLaunch::new(
        stride(batch, heads * rows * words),
        stride(heads, rows * words),
        stride(rows, words),
        rows as u32 - 1,
        distinct as u32 - 1,
    )
}
