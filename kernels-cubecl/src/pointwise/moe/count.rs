//! Tokens of each expert, in total and before each chunk of tokens.
use crate::pointwise::{CubeShape, MOST, PointwiseError, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Tokens of a cube.
pub const CHUNK: u32 = 64;

/// Chunks whose counts are in flight at a time.
const IN_FLIGHT: u32 = 16;
/// Most numbers of shared memory.
const MOST_SHARED: usize = 8192;

/// Sizes of [`count`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CountShape {
    /// Tokens.
    pub tokens: usize,
    /// Samples, counted separately: token `t` belongs to sample `t % samples`.
    pub samples: usize,
    /// Experts to choose from.
    pub experts: usize,
    /// Experts per token.
    pub top_k: usize,
}

impl CountShape {
    /// Chunks of [`CHUNK`] tokens of a sample.
    pub fn chunks(&self) -> usize {
        self.tokens.div_ceil(self.samples).div_ceil(CHUNK as usize)
    }

    /// Counts of a chunk.
    pub fn width(&self) -> usize {
        self.samples * self.experts
    }

    fn check(&self) -> Result<(), PointwiseError> {
        check("experts", self.experts, 1, MOST)?;
        check("experts per token", self.top_k, 1, self.experts.min(MOST_SHARED / CHUNK as usize))?;
        check("samples", self.samples, 1, u16::MAX as usize)?;
        check("tokens", self.tokens, self.samples, MOST / self.experts)?;
        check("chunks", self.chunks(), 1, MOST / self.width())
    }

    /// Whether [`count`] takes these sizes.
    pub fn has_kernel(&self) -> bool {
        self.check().is_ok()
    }
}

/// The experts of the tokens of chunk `CUBE_POS_X` of a sample, into shared memory; -1 past the last token.
#[cube]
pub(super) fn read_chunk(
    choice: &[i32],
    chunk: &mut Shared<[i32]>,
    positions: u32,
    samples: u32,
    sample: u32,
    #[comptime] top_k: u32,
) {
    let mut at = UNIT_POS;
    while at < comptime![CHUNK * top_k] {
        let position = CUBE_POS_X * CHUNK + at / top_k;
        let inside = min(position, positions - 1);
        let expert = choice[((inside * samples + sample) * top_k + at % top_k) as usize];
        chunk[at as usize] = select(position < positions, expert, -1i32);
        at += CUBE_DIM_X;
    }
    sync_cube();
}

/// Cube `(chunk, sample)`; a unit takes an expert.
#[cube(launch_unchecked)]
pub fn count_chunks(
    choice: &[i32],
    counts: &mut [i32],
    positions: u32,
    samples: u32,
    experts: u32,
    #[comptime] top_k: u32,
) {
    let mut chunk = Shared::<[i32]>::new_slice(comptime![(CHUNK * top_k) as usize]);
    let sample = CUBE_POS_Y;
    read_chunk(choice, &mut chunk, positions, samples, sample, top_k);
    let mut expert = UNIT_POS;
    while expert < experts {
        let mut count = 0i32;
        let mut at = 0u32;
        while at < comptime![CHUNK * top_k] {
            count += select(chunk[at as usize] == expert as i32, 1i32, 0i32);
            at += 1;
        }
        counts[((CUBE_POS_X * samples + sample) * experts + expert) as usize] = count;
        expert += CUBE_DIM_X;
    }
}

/// Replaces the counts of every chunk by the sums over all chunks before it. A unit takes a column.
#[cube(launch_unchecked)]
pub fn scan_chunks(counts: &mut [i32], totals: &mut [i32], chunks: u32, width: u32) {
    let column = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if column < width {
        let mut sum = 0i32;
        let mut first = 0u32;
        while first < chunks {
            let mut in_flight = Array::<i32>::new(comptime![IN_FLIGHT as usize]);
            #[unroll]
            for k in 0..comptime![IN_FLIGHT as usize] {
                let chunk = first + comptime![k as u32];
                in_flight[k] = counts[(min(chunk, chunks - 1) * width + column) as usize];
            }
            #[unroll]
            for k in 0..comptime![IN_FLIGHT as usize] {
                let chunk = first + comptime![k as u32];
                if chunk < chunks {
                    counts[(chunk * width + column) as usize] = sum;
                    sum += in_flight[k];
                }
            }
            first += IN_FLIGHT;
        }
        totals[column as usize] = sum;
    }
}

/// Counts of `choice [tokens, top_k]` (`i32`, -1 is no expert): `totals [samples, experts]`, and in `before [chunks,
/// samples, experts]` those of all tokens of the sample before a chunk of [`CHUNK`] (`i32`).
///
/// # Errors
/// If the sizes are too large, or a buffer too short.
pub fn count(
    client: &Client,
    choice: &Handle,
    before: &Handle,
    totals: &Handle,
    shape: CountShape,
) -> Result<(), PointwiseError> {
    shape.check()?;
    let CountShape { tokens, samples, experts, top_k } = shape;
    let (cube, chunks, width) = (CubeShape::of(client), shape.chunks(), shape.width());
    let choice = buffer("choice", choice, tokens * top_k, 4)?;
    let before = || buffer("before", before, chunks * width, 4);
    let (counts, scanned, totals) = (before()?, before()?, buffer("totals", totals, width, 4)?);
    // SAFETY: the buffers hold all tokens, chunks and experts; units stay in their chunk or column.
    unsafe {
        launch_kernel!(count_chunks, client, CubeCount::Static(chunks as u32, samples as u32, 1), cube.dim();
            choice, counts; (tokens / samples) as u32, samples as u32, experts as u32; top_k as u32);
        launch_kernel!(scan_chunks, client, cube.line(width), cube.dim(); scanned, totals; chunks as u32, width as u32);
    }
    Ok(())
}
