//! Where the copies of tokens stand that are sent to experts or computed by them. Nothing is counted by atomics: a
//! place is where the rows of an expert begin plus the number of tokens in front that use it.
use super::count::read_chunk;
use crate::pointwise::{CubeShape, MOST, PointwiseError, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Tokens of a cube.
pub const CHUNK: u32 = 64;
/// Numbers that have a bit for each of them.
const WORDS: u32 = CHUNK / 32;
/// Most experts, whose bits shared memory holds.
const MOST_EXPERTS: usize = 2048;
/// Most parts of an expert.
const MOST_PARTS: usize = 1024;

/// Sizes of [`place`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaceShape {
    /// Tokens.
    pub tokens: usize,
    /// Experts to choose from.
    pub experts: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Members that share an expert, each of which gets a copy.
    pub parts: usize,
    /// Neighbouring experts that the same members share.
    pub each: usize,
    /// Tokens that an expert takes, the first ones.
    pub room: usize,
    /// Rows to be filled.
    pub rows: usize,
}

impl PlaceShape {
    fn check(&self) -> Result<(), PointwiseError> {
        check("experts", self.experts, 1, MOST_EXPERTS)?;
        check("parts of an expert", self.parts, 1, MOST_PARTS)?;
        check("tokens", self.tokens, 1, MOST / self.experts / self.parts)?;
        check("experts of a token", self.top_k, 1, self.experts.min(128))?;
        check("experts of a member", self.each, 1, self.experts)?;
        check("rows", self.rows, 1, i32::MAX as usize)
    }

    /// Whether [`place`] takes these sizes.
    pub fn has_kernel(&self) -> bool {
        self.check().is_ok()
    }
}

/// A cube takes a chunk of tokens, a unit an expert of a token. In shared memory every expert has a bit for each of the
/// tokens that use it: those in front are counted at once.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn place_copies(
    choice: &[i32],
    before: &[i32],
    starts: &[i32],
    tokens_of: &mut [i32],
    slots_of: &mut [i32],
    of_tokens: &mut [i32],
    of_slots: &mut [i32],
    tokens: u32,
    each: u32,
    room: u32,
    rows: u32,
    #[comptime] experts: u32,
    #[comptime] top_k: u32,
    #[comptime] parts: u32,
) {
    let mut chunk = Shared::<[i32]>::new_slice(comptime![(CHUNK * top_k) as usize]);
    let users = Shared::<[Atomic<u32>]>::new_slice(comptime![(WORDS * experts) as usize]);
    let mut word = UNIT_POS;
    while word < comptime![WORDS * experts] {
        users[word as usize].store(0u32);
        word += CUBE_DIM_X;
    }
    read_chunk(choice, &mut chunk, tokens, 1u32, 0u32, top_k);
    let mut at = UNIT_POS;
    while at < comptime![CHUNK * top_k] {
        let expert = chunk[at as usize];
        if expert >= 0 {
            let inside = at / top_k;
            users[(expert as u32 * WORDS + inside / 32) as usize].fetch_or(1u32 << (inside % 32));
        }
        at += CUBE_DIM_X;
    }
    sync_cube();
    let mut at = UNIT_POS;
    while at < comptime![CHUNK * top_k] {
        if chunk[at as usize] >= 0 {
            let expert = chunk[at as usize] as u32;
            let inside = at / top_k;
            let mut rank = before[(CUBE_POS_X * experts + expert) as usize] as u32;
            #[unroll]
            for i in 0..WORDS {
                let bits = users[(expert * WORDS + i) as usize].load();
                let in_front = (1u32 << (inside % 32)) - 1;
                let own = select(i == inside / 32, bits & in_front, 0u32);
                rank += select(i < inside / 32, bits, own).count_ones();
            }
            if rank < room {
                let token = CUBE_POS_X * CHUNK + inside;
                let slot = token * experts + expert;
                // Copies of a token in the order of the rows: by member, of which `parts` share experts, and expert.
                let mut earlier = at % top_k;
                let mut same = 1u32;
                if comptime![parts > 1] {
                    earlier = 0u32;
                    same = 0u32;
                    let mut nth = 0u32;
                    while nth < top_k {
                        let other = chunk[(at / top_k * top_k + nth) as usize];
                        if other >= 0 {
                            earlier += select(other as u32 / each < expert / each, 1u32, 0u32);
                            same += select(other as u32 / each == expert / each, 1u32, 0u32);
                        }
                        nth += 1;
                    }
                }
                let behind = at % top_k - select(comptime![parts > 1], earlier, at % top_k);
                let mut part = 0u32;
                while part < parts {
                    let start = starts[(part * experts + expert) as usize];
                    let row = start as u32 + rank;
                    if start >= 0 && row < rows {
                        tokens_of[row as usize] = token as i32;
                        slots_of[row as usize] = slot as i32;
                        let column = earlier * parts + part * same + behind;
                        of_tokens[(token * comptime![top_k * parts] + column) as usize] = row as i32;
                        of_slots[(slot * parts + part) as usize] = row as i32;
                    }
                    part += 1;
                }
            }
        }
        at += CUBE_DIM_X;
    }
}

/// Rows and copies of tokens, all of them `i32`.
#[derive(Clone, Copy, Debug)]
pub struct Places<'a> {
    /// `[rows]`: the token that a row is a copy of.
    pub tokens_of: &'a Handle,
    /// `[rows]`: the slot, `token · experts + expert`, that a row is of.
    pub slots_of: &'a Handle,
    /// `[tokens, top_k · parts]`: the rows that are copies of a token, ascending.
    pub of_tokens: &'a Handle,
    /// `[tokens · experts, parts]`: the rows that are of a slot, ascending.
    pub of_slots: &'a Handle,
}

/// Fills in the places of the copies of tokens; everything else in the tables is left as it is. `choice [tokens,
/// top_k]` has ascending experts, then -1; `before [chunks, experts]` is of [`count`](super::count::count) with one
/// sample; `starts [parts, experts]` says where the rows of an expert begin for each of the members that share it,
/// ascending with the part, or is -1 where no row is made (`i32`).
///
/// # Errors
/// If the sizes are too large, or a buffer too short.
pub fn place(
    client: &Client,
    [choice, before, starts]: [&Handle; 3],
    places: Places,
    shape: PlaceShape,
) -> Result<(), PointwiseError> {
    shape.check()?;
    let PlaceShape { tokens, experts, top_k, parts, each, room, rows } = shape;
    let (cube, chunks) = (CubeShape::of(client), tokens.div_ceil(CHUNK as usize));
    let choice = buffer("choice", choice, tokens * top_k, 4)?;
    let before = buffer("before", before, chunks * experts, 4)?;
    let starts = buffer("starts", starts, parts * experts, 4)?;
    let tokens_of = buffer("tokens of rows", places.tokens_of, rows, 4)?;
    let slots_of = buffer("slots of rows", places.slots_of, rows, 4)?;
    let of_tokens = buffer("rows of tokens", places.of_tokens, tokens * top_k * parts, 4)?;
    let of_slots = buffer("rows of slots", places.of_slots, tokens * experts * parts, 4)?;
    // SAFETY: rows are compared with their number, tokens and experts are in the tables, and the buffers hold all.
    unsafe {
        place_copies::launch_unchecked(
            client,
            CubeCount::Static(chunks as u32, 1, 1),
            cube.dim(),
            choice,
            before,
            starts,
            tokens_of,
            slots_of,
            of_tokens,
            of_slots,
            tokens as u32,
            each as u32,
            room.min(MOST) as u32,
            rows as u32,
            experts as u32,
            top_k as u32,
            parts as u32,
        )
    };
    Ok(())
}

/// A unit for each row.
#[cube(launch_unchecked)]
pub fn spread_runs(runs: &[i32], out: &mut [i32], count: u32, rows: u32) {
    let row = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if row < rows {
        // The runs that begin at this row or before.
        let mut low = 0u32;
        let mut high = count;
        while low < high {
            let middle = (low + high) / 2;
            if runs[middle as usize] as u32 <= row {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        let mut found = (-1i32).runtime();
        if low > 0 {
            let run = low - 1;
            let inside = row - runs[run as usize] as u32;
            if inside < runs[(2 * count + run) as usize] as u32 {
                found = runs[(count + run) as usize] + inside as i32;
            }
        }
        out[row as usize] = found;
    }
}

/// `out [rows]` (`i32`) of `runs [3, count]` (`i32`): run `i` begins at row `runs[0, i]`, ascending, and has `runs[2,
/// i]` rows with the numbers from `runs[1, i]` on. Rows of no run have -1.
///
/// # Errors
/// If a buffer is too short, or a size too large.
pub fn runs(client: &Client, runs: &Handle, out: &Handle, [count, rows]: [usize; 2]) -> Result<(), PointwiseError> {
    check("runs", count, 1, i32::MAX as usize / 3)?;
    check("rows", rows, 1, i32::MAX as usize)?;
    let cube = CubeShape::of(client);
    let (table, out) = (buffer("runs", runs, 3 * count, 4)?, buffer("out", out, rows, 4)?);
    // SAFETY: the buffers hold all runs and rows, and other units do nothing.
    unsafe {
        spread_runs::launch_unchecked(client, cube.line(rows), cube.dim(), table, out, count as u32, rows as u32)
    };
    Ok(())
}
