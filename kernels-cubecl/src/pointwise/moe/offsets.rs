//! Where the tokens of each expert begin in a buffer that has them one expert after the other, from counts that are
//! only on the device.
use crate::pointwise::{CubeShape, MOST, PointwiseError, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Most experts: a unit goes through all of them.
const MOST_EXPERTS: usize = 2048;

/// The order of the dispatched tokens: by chunk of the local experts, rank, shard of an expert, and expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffsetsShape {
    /// Experts to choose from.
    pub experts: usize,
    /// Neighbouring experts on the same ranks.
    pub experts_per_rank: usize,
    /// Ranks among which an expert is sharded; each gets a copy of its tokens.
    pub shards: usize,
    /// Chunks of a rank's experts: chunk `i` has the experts from `experts_per_rank i / chunks` to `experts_per_rank (i
    /// + 1) / chunks`.
    pub chunks: usize,
}

impl OffsetsShape {
    fn check(&self) -> Result<(), PointwiseError> {
        check("experts", self.experts, self.experts_per_rank.max(1), MOST_EXPERTS)?;
        check("experts per rank", self.experts_per_rank, 1, self.experts)?;
        check("chunks", self.chunks, 1, self.experts_per_rank)?;
        check("shards of an expert", self.shards, 1, MOST / self.experts)
    }

    /// Whether [`starts`] takes these sizes.
    pub fn has_kernel(&self) -> bool {
        self.check().is_ok()
    }
}

/// The block of expert `expert`; there is a block for each chunk and rank.
#[cube]
fn block(expert: u32, #[comptime] experts: u32, #[comptime] experts_per_rank: u32, #[comptime] chunks: u32) -> u32 {
    // The last chunk that begins at or before the expert.
    let chunk = ((expert % experts_per_rank + 1) * chunks - 1) / experts_per_rank;
    chunk * comptime![experts / experts_per_rank] + expert / experts_per_rank
}

/// A unit takes a shard of an expert and adds up the counts before it.
#[cube(launch_unchecked)]
pub fn expert_offsets(
    totals: &[i32],
    starts: &mut [i32],
    #[comptime] experts: u32,
    #[comptime] experts_per_rank: u32,
    #[comptime] shards: u32,
    #[comptime] chunks: u32,
) {
    let index = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if index < comptime![shards * experts] {
        let shard = index / experts;
        let expert = index % experts;
        let own = block(expert, experts, experts_per_rank, chunks);
        let mut start = 0i32;
        let mut other = 0u32;
        while other < experts {
            let theirs = block(other, experts, experts_per_rank, chunks);
            let in_block = shard + select(other < expert, 1u32, 0u32);
            let copies = select(theirs < own, shards.runtime(), select(theirs == own, in_block, 0u32));
            start += totals[other as usize] * copies as i32;
            other += 1;
        }
        starts[index as usize] = start;
    }
}

/// `starts [shards, experts]`: where the tokens of an expert begin, if `totals [experts]` tokens use it (both `i32`)
/// and each of its shards gets all of them.
///
/// # Errors
/// If the sizes are too large, or a buffer too short.
pub fn starts(client: &Client, totals: &Handle, starts: &Handle, shape: OffsetsShape) -> Result<(), PointwiseError> {
    shape.check()?;
    let OffsetsShape { experts, experts_per_rank, shards, chunks } = shape;
    let cube = CubeShape::of(client);
    let (totals, starts) = (buffer("totals", totals, experts, 4)?, buffer("starts", starts, shards * experts, 4)?);
    // SAFETY: the buffers hold all experts and their shards, and other units do nothing.
    unsafe {
        launch_kernel!(expert_offsets, client, cube.line(shards * experts), cube.dim();
            totals, starts; experts as u32, experts_per_rank as u32, shards as u32, chunks as u32)
    };
    Ok(())
}
