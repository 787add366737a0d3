//! Where the rows of experts begin that stand one behind the other, from counts that the host does not know.
use crate::pointwise::{CubeShape, MOST, PointwiseError, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Most experts: a unit goes through all of them.
const MOST_EXPERTS: usize = 2048;

/// The order of the rows of experts: by piece of every member's experts, member, part of an expert, and expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OrderShape {
    /// Experts to choose from.
    pub experts: usize,
    /// Neighbouring experts that the same members share.
    pub each: usize,
    /// Members that share an expert, each of which gets a copy.
    pub parts: usize,
    /// Pieces of a member's experts: piece `i` is the experts from `each i / pieces` to `each (i + 1) / pieces` of
    /// them.
    pub pieces: usize,
}

impl OrderShape {
    fn check(&self) -> Result<(), PointwiseError> {
        check("experts", self.experts, self.each.max(1), MOST_EXPERTS)?;
        check("experts of a member", self.each, 1, self.experts)?;
        check("pieces", self.pieces, 1, self.each)?;
        check("parts of an expert", self.parts, 1, MOST / self.experts)
    }

    /// Whether [`starts`] takes these sizes.
    pub fn has_kernel(&self) -> bool {
        self.check().is_ok()
    }
}

/// Which of all blocks of experts, one for each piece and member, expert `expert` is in.
#[cube]
fn block(expert: u32, #[comptime] experts: u32, #[comptime] each: u32, #[comptime] pieces: u32) -> u32 {
    // The piece that begins last at or before the expert.
    let piece = ((expert % each + 1) * pieces - 1) / each;
    piece * comptime![experts / each] + expert / each
}

/// A unit takes a part of an expert and adds up what stands in front of it.
#[cube(launch_unchecked)]
pub fn starts_in_order(
    totals: &[i32],
    starts: &mut [i32],
    #[comptime] experts: u32,
    #[comptime] each: u32,
    #[comptime] parts: u32,
    #[comptime] pieces: u32,
) {
    let place = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if place < comptime![parts * experts] {
        let part = place / experts;
        let expert = place % experts;
        let own = block(expert, experts, each, pieces);
        let mut start = 0i32;
        let mut other = 0u32;
        while other < experts {
            let theirs = block(other, experts, each, pieces);
            let in_block = part + select(other < expert, 1u32, 0u32);
            let copies = select(theirs < own, parts.runtime(), select(theirs == own, in_block, 0u32));
            start += totals[other as usize] * copies as i32;
            other += 1;
        }
        starts[place as usize] = start;
    }
}

/// `starts [parts, experts]`: where the rows of an expert begin if `totals [experts]` tokens use it (both `i32`) and
/// every part of it gets all of them.
///
/// # Errors
/// If the sizes are too large, or a buffer too short.
pub fn starts(client: &Client, totals: &Handle, starts: &Handle, shape: OrderShape) -> Result<(), PointwiseError> {
    shape.check()?;
    let OrderShape { experts, each, parts, pieces } = shape;
    let cube = CubeShape::of(client);
    let (totals, starts) = (buffer("totals", totals, experts, 4)?, buffer("starts", starts, parts * experts, 4)?);
    // SAFETY: the buffers hold all experts and their parts, and other units do nothing.
    unsafe {
        starts_in_order::launch_unchecked(
            client,
            cube.line(parts * experts),
            cube.dim(),
            totals,
            starts,
            experts as u32,
            each as u32,
            parts as u32,
            pieces as u32,
        )
    };
    Ok(())
}
