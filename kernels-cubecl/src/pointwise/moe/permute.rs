//! The permutation of tokens to experts: where the copies of each token lie in the dispatch buffer, or in the input of
//! the experts. Without atomics: the position is the start of the expert plus the number of earlier tokens that use it.
use super::count::{CHUNK, read_chunk};
use crate::pointwise::{CubeShape, MOST, PointwiseError, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Words with a bit for each token of a cube.
const WORDS: u32 = CHUNK / 32;
/// Most experts: shared memory holds a bit for each token and expert.
const MOST_EXPERTS: usize = 2048;
/// Most shards of an expert.
const MOST_SHARDS: usize = 1024;

/// Sizes of [`permute`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PermuteShape {
    /// Tokens.
    pub tokens: usize,
    /// Experts to choose from.
    pub experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Ranks among which an expert is sharded; each gets a copy of its tokens.
    pub shards: usize,
    /// Neighbouring experts on the same ranks.
    pub experts_per_rank: usize,
    /// Most tokens of an expert; it takes the first ones.
    pub capacity: usize,
    /// Rows of the permuted buffer.
    pub rows: usize,
}

impl PermuteShape {
    fn check(&self) -> Result<(), PointwiseError> {
        check("experts", self.experts, 1, MOST_EXPERTS)?;
        check("shards of an expert", self.shards, 1, MOST_SHARDS)?;
        check("tokens", self.tokens, 1, MOST / self.experts / self.shards)?;
        check("experts per token", self.top_k, 1, self.experts.min(128))?;
        check("experts per rank", self.experts_per_rank, 1, self.experts)?;
        check("rows", self.rows, 1, i32::MAX as usize)
    }

    /// Whether [`permute`] takes these sizes.
    pub fn has_kernel(&self) -> bool {
        self.check().is_ok()
    }
}

/// A cube takes a chunk of tokens, a unit an expert of a token. In shared memory every expert has a bit for each of the
/// tokens that use it, so the earlier ones are counted at once.
#[cube(launch_unchecked)]
pub fn permute_tokens(
    choice: &[i32],
    before: &[i32],
    starts: &[i32],
    token_of_row: &mut [i32],
    slot_of_row: &mut [i32],
    rows_of_token: &mut [i32],
    rows_of_slot: &mut [i32],
    tokens: u32,
    experts_per_rank: u32,
    capacity: u32,
    rows: u32,
    #[comptime] experts: u32,
    #[comptime] top_k: u32,
    #[comptime] shards: u32,
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
                let earlier_bits = (1u32 << (inside % 32)) - 1;
                let own = select(i == inside / 32, bits & earlier_bits, 0u32);
                rank += select(i < inside / 32, bits, own).count_ones();
            }
            if rank < capacity {
                let token = CUBE_POS_X * CHUNK + inside;
                let slot = token * experts + expert;
                // The copies of a token in the order of the rows: by rank, of which `shards` share experts, and expert.
                let mut earlier = at % top_k;
                let mut same = 1u32;
                if comptime![shards > 1] {
                    earlier = 0u32;
                    same = 0u32;
                    let mut nth = 0u32;
                    while nth < top_k {
                        let other = chunk[(at / top_k * top_k + nth) as usize];
                        if other >= 0 {
                            earlier += select(other as u32 / experts_per_rank < expert / experts_per_rank, 1u32, 0u32);
                            same += select(other as u32 / experts_per_rank == expert / experts_per_rank, 1u32, 0u32);
                        }
                        nth += 1;
                    }
                }
                let behind = at % top_k - select(comptime![shards > 1], earlier, at % top_k);
                let mut shard = 0u32;
                while shard < shards {
                    let start = starts[(shard * experts + expert) as usize];
                    let row = start as u32 + rank;
                    if start >= 0 && row < rows {
                        token_of_row[row as usize] = token as i32;
                        slot_of_row[row as usize] = slot as i32;
                        let column = earlier * shards + shard * same + behind;
                        rows_of_token[(token * comptime![top_k * shards] + column) as usize] = row as i32;
                        rows_of_slot[(slot * shards + shard) as usize] = row as i32;
                    }
                    shard += 1;
                }
            }
        }
        at += CUBE_DIM_X;
    }
}

/// The permutation, from permuted rows to tokens and back; all `i32`.
#[derive(Clone, Copy, Debug)]
pub struct PermuteTables<'a> {
    /// `[rows]`: the token of a row.
    pub token_of_row: &'a Handle,
    /// `[rows]`: the slot, `token · experts + expert`, of a row.
    pub slot_of_row: &'a Handle,
    /// `[tokens, top_k · shards]`: the rows of a token, ascending.
    pub rows_of_token: &'a Handle,
    /// `[tokens · experts, shards]`: the rows of a slot, ascending.
    pub rows_of_slot: &'a Handle,
}

/// Writes the entries of the permutation; all others stay as they are. `choice [tokens, top_k]` has ascending experts,
/// then -1; `before [chunks, experts]` is the output of [`count`](super::count::count) for one sample; `starts [shards,
/// experts]` says where the tokens of an expert begin for each of its shards, ascending with the shard, or is -1 if the
/// shard gets none (`i32`).
///
/// # Errors
/// If the sizes are too large, or a buffer too short.
pub fn permute(
    client: &Client,
    [choice, before, starts]: [&Handle; 3],
    tables: PermuteTables,
    shape: PermuteShape,
) -> Result<(), PointwiseError> {
    shape.check()?;
    let PermuteShape { tokens, experts, top_k, shards, experts_per_rank, capacity, rows } = shape;
    let (cube, chunks) = (CubeShape::of(client), tokens.div_ceil(CHUNK as usize));
    let choice = buffer("choice", choice, tokens * top_k, 4)?;
    let before = buffer("before", before, chunks * experts, 4)?;
    let starts = buffer("starts", starts, shards * experts, 4)?;
    let token_of_row = buffer("tokens of rows", tables.token_of_row, rows, 4)?;
    let slot_of_row = buffer("slots of rows", tables.slot_of_row, rows, 4)?;
    let rows_of_token = buffer("rows of tokens", tables.rows_of_token, tokens * top_k * shards, 4)?;
    let rows_of_slot = buffer("rows of slots", tables.rows_of_slot, tokens * experts * shards, 4)?;
    // SAFETY: the kernel compares rows with their number, tokens and experts are in the tables, and the buffers hold
    // all.
    unsafe {
        launch_kernel!(permute_tokens, client, CubeCount::Static(chunks as u32, 1, 1), cube.dim();
            choice, before, starts, token_of_row, slot_of_row, rows_of_token, rows_of_slot;
            tokens as u32, experts_per_rank as u32, capacity.min(MOST) as u32, rows as u32;
            experts as u32, top_k as u32, shards as u32)
    };
    Ok(())
}

/// A unit for each row.
#[cube(launch_unchecked)]
pub fn expand_runs(runs: &[i32], out: &mut [i32], count: u32, rows: u32) {
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
        expand_runs::launch_unchecked(client, cube.line(rows), cube.dim(), table, out, count as u32, rows as u32)
    };
    Ok(())
}
