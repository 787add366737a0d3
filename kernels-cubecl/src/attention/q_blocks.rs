//! The loop of a cube with 128 keys over the q blocks that see them, one query head after the other of those that share
//! the key head.
use super::variant::{CubeSequence, Sizes};
use crate::tiling::QBlocks;
use cubecl::prelude::*;

/// The q blocks of a cube.
#[derive(CubeType)]
pub struct QLoop {
    pub batch: i32,
    /// First query head of the group.
    pub head: u32,
    /// All query heads.
    pub heads: u32,
    /// First row of the sequence in Q.
    pub row: u32,
    /// First q block of each head.
    pub first: u32,
    /// Number of q blocks of each head.
    pub steps_per_head: u32,
    /// Number of q blocks of all heads of the group.
    pub steps: u32,
    /// Elements whose dropout hash is below this are dropped.
    pub drop_threshold: u32,
    /// Factor of the elements that dropout keeps, `1 / (1 - p)`.
    pub keep_scale: f32,
}

/// The q block of a step.
#[derive(CubeType)]
pub struct QBlock {
    pub head: i32,
    /// First row in Q.
    pub row: i32,
    /// Row of the statistics: one for each head of each batch.
    pub stats_row: i32,
}

/// The loop over `blocks` of the query heads that share key head `kv_head`, of `CUBE_COUNT_X`.
#[cube]
pub fn q_loop(sequence: &CubeSequence, blocks: &QBlocks, kv_head: u32, sizes: &Sizes) -> QLoop {
    let steps_per_head = blocks.end - blocks.first;
    QLoop {
        batch: sequence.batch,
        head: kv_head * sizes.group,
        heads: CUBE_COUNT_X * sizes.group,
        row: sequence.first_query,
        first: blocks.first,
        steps_per_head,
        steps: steps_per_head * sizes.group,
        drop_threshold: sizes.drop_threshold,
        keep_scale: sizes.keep_scale,
    }
}

/// The block of `block` queries of step `step`.
#[cube]
pub fn q_block(q_loop: &QLoop, step: u32, #[comptime] block: usize) -> QBlock {
    let head = q_loop.head + step / q_loop.steps_per_head;
    let row = (q_loop.row + (q_loop.first + step % q_loop.steps_per_head) * comptime![block as u32]) as i32;
    QBlock { head: head as i32, row, stats_row: q_loop.batch * q_loop.heads as i32 + head as i32 }
}
