//! How a cube of 128 keys goes through the blocks of queries that see them, one head after the other of those that
//! share them.
use super::variant::{Part, Sizes};
use crate::tiling::QueryBlocks;
use cubecl::prelude::*;

/// Which queries a cube reads.
#[derive(CubeType)]
pub struct Source {
    pub batch: i32,
    /// First query head of the group.
    pub head: u32,
    /// All query heads.
    pub heads: u32,
    /// First row of the sequence.
    pub row: u32,
    /// First block of each head.
    pub first: u32,
    /// Blocks of each head.
    pub steps: u32,
    /// Blocks of all heads of the group.
    pub total: u32,
    /// Dropout's draws below this are dropped.
    pub limit: u32,
    /// What dropout multiplies the others with.
    pub keep: f32,
}

/// The block of a step.
#[derive(CubeType)]
pub struct Block {
    pub head: i32,
    /// First row.
    pub row: i32,
    /// Row of the statistics: one for each head of each batch.
    pub row_of_heads: i32,
}

/// The queries in `blocks` of the heads that share key head `kv_head`, of `CUBE_COUNT_X`.
#[cube]
pub fn source(part: &Part, blocks: &QueryBlocks, kv_head: u32, sizes: &Sizes) -> Source {
    let steps = blocks.end - blocks.first;
    Source {
        batch: part.batch,
        head: kv_head * sizes.group,
        heads: CUBE_COUNT_X * sizes.group,
        row: part.first_query,
        first: blocks.first,
        steps,
        total: steps * sizes.group,
        limit: sizes.limit,
        keep: sizes.keep,
    }
}

/// The block of `block` queries of step `step`.
#[cube]
pub fn block(source: &Source, step: u32, #[comptime] block: usize) -> Block {
    let head = source.head + step / source.steps;
    let row = (source.row + (source.first + step % source.steps) * comptime![block as u32]) as i32;
    Block { head: head as i32, row, row_of_heads: source.batch * source.heads as i32 + head as i32 }
}
