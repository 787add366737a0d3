//! How a cube of 128 query rows goes through the blocks of keys that they see, from the last to the first.
use super::draw;
use super::tile::{self, Ring};
use super::variant::{Part, Sizes, Variant};
use crate::tiling::{KeyBlocks, QUERY_ROWS};
use cubecl::prelude::*;
use half::bf16;

/// Which keys and values a cube reads.
#[derive(CubeType)]
pub struct Source {
    pub batch: i32,
    pub head: i32,
    /// First row of the sequence.
    pub row: u32,
    /// One past the last block, which is read first.
    pub end: u32,
    /// Blocks.
    pub count: u32,
    /// Dropout's draws below this are dropped.
    pub limit: u32,
    /// What dropout multiplies the others with.
    pub keep: f32,
    /// Spread number of the sequence's first key.
    pub first_column: u32,
}

/// Where a unit's scores lie.
#[derive(CubeType)]
pub struct Place {
    /// The warpgroup, 0 or 1.
    pub role: u32,
    pub row: u32,
    pub column: u32,
}

/// What all steps of a cube are told; `O` are the descriptors of its tiles.
#[derive(CubeType)]
pub struct Fixed<O: CubeType> {
    pub place: Place,
    pub part: Part,
    pub source: Source,
    pub at: O,
    pub scale_log2: f32,
}

/// Ends the kernel for a cube behind the last row of its packed sequence: the grid is as large as the longest asks for.
#[cube]
pub fn leave_behind_the_end(part: &Part, #[comptime] variant: Variant) {
    if comptime![variant.packed] {
        if CUBE_POS_Z * comptime![QUERY_ROWS as u32] >= part.sight.queries {
            terminate!();
        }
    }
}

/// The cube's first query row. Causal rows further down have more work: they start first.
#[cube]
pub fn first_row(part: &Part, #[comptime] variant: Variant) -> u32 {
    let rows = comptime![QUERY_ROWS as u32];
    let block = if comptime![variant.causal] { (part.sight.queries - 1) / rows - CUBE_POS_Z } else { CUBE_POS_Z };
    block * rows
}

/// The blocks of `block` keys that the cube's rows see.
#[cube]
pub fn blocks(first_row: u32, part: &Part, #[comptime] block: usize, #[comptime] variant: Variant) -> KeyBlocks {
    KeyBlocks::new(
        first_row,
        &part.sight,
        comptime![block as u32],
        comptime![variant.causal],
        comptime![variant.window],
    )
}

/// The keys and values in `blocks` of query head `head`.
#[cube]
pub fn source(part: &Part, blocks: &KeyBlocks, head: u32, sizes: &Sizes) -> Source {
    let count = blocks.end - blocks.first;
    Source {
        batch: part.batch,
        head: (head / sizes.group) as i32,
        row: part.first_key,
        end: blocks.end,
        count,
        limit: sizes.limit,
        keep: sizes.keep,
        first_column: draw::spread(part.first_key + sizes.first_key),
    }
}

/// Starts the copy of the tile of step `step`: `block` rows of `map`.
#[cube]
#[allow(clippy::too_many_arguments)]
pub fn load(
    ring: &mut Ring,
    map: &TensorMap<bf16, Tiled>,
    source: &Source,
    step: u32,
    #[comptime] length: usize,
    #[comptime] block: usize,
    #[comptime] stages: usize,
) {
    let row = (source.row + (source.end - 1 - step) * comptime![block as u32]) as i32;
    let slot = tile::slot(step, stages);
    tile::load(ring, &slot, map, source.batch, source.head, row, 0u32, block, length);
}

/// Key of the unit's first score in step `step`. Where the block is at an edge, hides what is not seen of it.
#[cube]
pub fn mask<O: CubeType>(
    scores: &mut Array<f32>,
    fixed: &Fixed<O>,
    step: u32,
    edge: bool,
    #[comptime] block: usize,
    #[comptime] variant: Variant,
) -> u32 {
    let column = (fixed.source.end - 1 - step) * comptime![block as u32] + fixed.place.column;
    if edge {
        tile::hide(scores, fixed.place.row, column, &fixed.part.sight, block, variant);
    }
    column
}
