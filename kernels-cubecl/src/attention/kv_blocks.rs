//! The loop of a cube with 128 queries over the kv blocks that they see, from the last block to the first.
use super::dropout;
use super::tile::{self, Ring};
use super::variant::{CubeSequence, Sizes, Variant};
use crate::tiling::{CUBE_QUERIES, KvBlocks};
use cubecl::prelude::*;
use half::bf16;

/// The kv blocks of a cube.
#[derive(CubeType)]
pub struct KvLoop {
    pub batch: i32,
    pub head: i32,
    /// First row of the sequence in K and V.
    pub row: u32,
    /// One past the last kv block; the loop starts at the last.
    pub end: u32,
    /// Number of kv blocks.
    pub count: u32,
    /// Elements whose dropout hash is below this are dropped.
    pub drop_threshold: u32,
    /// Factor of the elements that dropout keeps, `1 / (1 - p)`.
    pub keep_scale: f32,
    /// [`spread`](dropout::spread) of the sequence's first key.
    pub first_column: u32,
}

/// Position of a unit's first score in the tile.
#[derive(CubeType)]
pub struct FragmentPosition {
    /// Index of the warpgroup, 0 or 1.
    pub warpgroup: u32,
    pub row: u32,
    pub column: u32,
}

/// What does not change over the loop; `O` are the descriptors of the cube's tiles.
#[derive(CubeType)]
pub struct LoopInvariants<O: CubeType> {
    pub fragment: FragmentPosition,
    pub sequence: CubeSequence,
    pub kv_loop: KvLoop,
    pub desc: O,
    pub scale_log2: f32,
}

/// Ends a cube that is past the last query of its packed sequence: the grid is sized for the longest.
#[cube]
pub fn exit_past_end(sequence: &CubeSequence, #[comptime] variant: Variant) {
    if comptime![variant.packed] {
        if CUBE_POS_Z * comptime![CUBE_QUERIES as u32] >= sequence.mask.queries {
            terminate!();
        }
    }
}

/// The cube's first query. With a causal mask the last queries see the most keys: they start first.
#[cube]
pub fn first_row(sequence: &CubeSequence, #[comptime] variant: Variant) -> u32 {
    let rows = comptime![CUBE_QUERIES as u32];
    let block = if comptime![variant.causal] { (sequence.mask.queries - 1) / rows - CUBE_POS_Z } else { CUBE_POS_Z };
    block * rows
}

/// The blocks of `block` keys that the cube's queries see.
#[cube]
pub fn visible_blocks(
    first_row: u32,
    sequence: &CubeSequence,
    #[comptime] block: usize,
    #[comptime] variant: Variant,
) -> KvBlocks {
    KvBlocks::new(
        first_row,
        &sequence.mask,
        comptime![block as u32],
        comptime![variant.causal],
        comptime![variant.window],
    )
}

/// The loop over `blocks` of the keys and values of query head `head`.
#[cube]
pub fn kv_loop(sequence: &CubeSequence, blocks: &KvBlocks, head: u32, sizes: &Sizes) -> KvLoop {
    let count = blocks.end - blocks.first;
    KvLoop {
        batch: sequence.batch,
        head: (head / sizes.group) as i32,
        row: sequence.first_key,
        end: blocks.end,
        count,
        drop_threshold: sizes.drop_threshold,
        keep_scale: sizes.keep_scale,
        first_column: dropout::spread(sequence.first_key + sizes.first_key),
    }
}

/// Starts the TMA load of step `step`: `block` rows of `map`.
#[cube]
pub fn load(
    ring: &mut Ring,
    map: &TensorMap<bf16, Tiled>,
    kv_loop: &KvLoop,
    step: u32,
    #[comptime] length: usize,
    #[comptime] block: usize,
    #[comptime] stages: usize,
) {
    let row = (kv_loop.row + (kv_loop.end - 1 - step) * comptime![block as u32]) as i32;
    let slot = tile::slot(step, stages);
    tile::load(ring, &slot, map, kv_loop.batch, kv_loop.head, row, 0u32, block, length);
}

/// Key of the unit's first score in step `step`. If `masked`, masks the scores of keys that are not visible.
#[cube]
pub fn mask_block<O: CubeType>(
    scores: &mut Array<f32>,
    invariants: &LoopInvariants<O>,
    step: u32,
    masked: bool,
    #[comptime] block: usize,
    #[comptime] variant: Variant,
) -> u32 {
    let column = (invariants.kv_loop.end - 1 - step) * comptime![block as u32] + invariants.fragment.column;
    if masked {
        tile::apply_mask(scores, invariants.fragment.row, column, &invariants.sequence.mask, block, variant);
    }
    column
}
