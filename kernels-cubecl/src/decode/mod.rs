//! One new token for each of many sequences whose keys and values are in pages: the attention of a decode step.
//!
//! The keys of all sequences are one buffer `[pages, block_size, kv_heads, head_dim]`, the values another. Row `s` of the
//! block table lists the pages of sequence `s`: its position `p` is in page `table[s][p / block_size]` (Kwon et al.,
//! PagedAttention, 2023). Lengths and tables are read on the device, so one recorded launch serves every step.
mod append;
mod attention;
mod merge;

pub use append::append;
pub use attention::attention;

use crate::pointwise::{PointwiseError, check};

/// Sizes of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeShape {
    /// Sequences, each with one new token.
    pub sequences: usize,
    /// Query heads.
    pub heads: usize,
    /// Heads of keys and of values.
    pub kv_heads: usize,
    /// Length of a head.
    pub head_dim: usize,
    /// Positions of a page.
    pub block_size: usize,
    /// Pages of the cache.
    pub pages: usize,
    /// Pages of the longest possible sequence: the length of a row of the block table.
    pub max_blocks: usize,
}

impl DecodeShape {
    /// Whether there are kernels for this shape.
    pub fn has_kernel(&self) -> bool {
        self.check().is_ok()
    }

    fn check(&self) -> Result<(), PointwiseError> {
        check("head_dim", self.head_dim, 8, 256)?;
        check("heads", self.heads, self.kv_heads.max(1), u16::MAX as usize)?;
        check("block_size", self.block_size, 1, 1 << 16)?;
        check("sequences", self.sequences, 1, u16::MAX as usize)?;
        check("max_blocks", self.max_blocks, 1, i32::MAX as usize / self.sequences)?;
        check("pages", self.pages, 1, i32::MAX as usize / (self.block_size * self.kv_heads * self.head_dim / 8))
    }

    /// Vectors of a head.
    fn vectors(&self) -> usize {
        self.head_dim / 8
    }

    /// Vectors of the packed projection `[sequences, heads + 2 kv_heads, head_dim]`.
    fn packed(&self) -> usize {
        self.sequences * (self.heads + 2 * self.kv_heads) * self.vectors()
    }

    /// Vectors of the pages.
    fn paged(&self) -> usize {
        self.pages * self.block_size * self.kv_heads * self.vectors()
    }
}
