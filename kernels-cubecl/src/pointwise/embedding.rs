//! Rows of a table by id, and their gradient: no atomics, every sum in the order of the tokens.
use super::{PointwiseError, SCRATCH, UNITS, Vec8, buffer, check, cube_sums};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Longest row of a table, in vectors.
const LONGEST: usize = 1 << 20;
/// Rows that are read at a time when many are added up.
const AHEAD: u32 = 4;

/// 16 bytes of anything.
type Bits = Vector<u32, Const<4>>;

/// A table of `rows` rows, the first of which has id `first_row`, and the number of ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableShape {
    /// Rows of the table.
    pub rows: usize,
    /// Numbers in a row.
    pub hidden: usize,
    /// Id of row 0.
    pub first_row: usize,
    /// Tokens.
    pub ids: usize,
}

impl TableShape {
    /// Whether there are kernels for this shape and numbers of `bytes` bytes.
    pub fn has_kernel(&self, bytes: usize) -> bool {
        self.check().is_ok() && (self.hidden * bytes).is_multiple_of(16)
    }

    fn check(&self) -> Result<(), PointwiseError> {
        check("hidden", self.hidden, 8, 8 * LONGEST)?;
        check("ids", self.ids, 1, i32::MAX as usize / (self.hidden / 2))?;
        check("rows", self.rows, 1, i32::MAX as usize / (self.hidden / 2))?;
        check("first_row + 1", self.first_row + 1, 1, i32::MAX as usize)
    }
}

/// Cube `(token, vectors)`.
#[cube(launch_unchecked)]
pub fn gather(table: &[Bits], ids: &[i32], out: &mut [Bits], width: u32, rows: u32, first_row: i32) {
    let column = CUBE_POS_Y * UNITS + UNIT_POS;
    if column < width {
        // An id in front of the table wraps around to a row behind it.
        let row = (ids[CUBE_POS_X as usize] - first_row) as u32;
        let at = (CUBE_POS_X * width + column) as usize;
        if row < rows {
            out[at] = table[(row * width + column) as usize];
        } else {
            out[at] = Bits::new(0u32);
        }
    }
}

/// How many tokens have the id of token `CUBE_POS_X`, if that is the first of them and in the table, else 0.
#[cube(launch_unchecked)]
pub fn count_equals(ids: &[i32], counts: &mut [u32], tokens: u32, rows: u32, first_row: i32) {
    let mut scratch = Shared::<[f32]>::new_slice(SCRATCH);
    let id = ids[CUBE_POS_X as usize];
    let mut before = 0.0f32;
    let mut from = 0.0f32;
    let mut token = UNIT_POS;
    while token < tokens {
        let equal = select(ids[token as usize] == id, 1.0f32, 0.0f32);
        before += select(token < CUBE_POS_X, equal, 0.0);
        from += select(token < CUBE_POS_X, 0.0, equal);
        token += UNITS;
    }
    let (before, from) = cube_sums(before, from, &mut scratch, 0u32);
    if UNIT_POS == 0 {
        let counts_here = before == 0.0 && ((id - first_row) as u32) < rows;
        counts[CUBE_POS_X as usize] = select(counts_here, u32::cast_from(from), 0u32);
    }
}

/// Adds this unit's vector of a token's gradient to `sums`.
#[cube]
fn add_vector<E: Float>(sums: &mut Array<f32>, value: Vec8<E>) {
    #[unroll]
    for i in 0..8usize {
        sums[i] = sums[i] + f32::cast_from(value.extract(i));
    }
}

/// Cube `(token, vectors)`: the first token of each id adds up the gradients of all tokens with this id, in their order,
/// and writes (or adds) the sum to the row of the table.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn sum_equals<E: Float, T: Float>(
    gradient: &[Vec8<E>],
    ids: &[i32],
    counts: &[u32],
    table: &mut [Vec8<T>],
    width: u32,
    tokens: u32,
    first_row: i32,
    #[comptime] add: bool,
) {
    let mut totals = Shared::<[f32]>::new_slice(comptime![UNITS as usize / 32]);
    let mut list = Shared::<[u32]>::new_slice(comptime![UNITS as usize]);
    let count = counts[CUBE_POS_X as usize];
    if count > 0 {
        let id = ids[CUBE_POS_X as usize];
        let column = CUBE_POS_Y * UNITS + UNIT_POS;
        // Units behind the row's end read its last vector and write nothing.
        let read = min(column, width - 1);
        let mut sums = Array::<f32>::new(8usize);
        #[unroll]
        for i in 0..8usize {
            sums[i] = 0.0;
        }
        add_vector(&mut sums, gradient[(CUBE_POS_X * width + read) as usize]);
        let mut found = 1u32;
        let mut first = CUBE_POS_X + 1;
        while found < count && first < tokens {
            let token = first + UNIT_POS;
            let mut hit = 0.0f32;
            if token < tokens {
                hit = select(ids[token as usize] == id, 1.0f32, 0.0f32);
            }
            let upto = plane_inclusive_sum(hit);
            if UNIT_POS % 32 == 31 {
                totals[(UNIT_POS / 32) as usize] = upto;
            }
            sync_cube();
            let plane = UNIT_POS / 32;
            let mut before = 0.0f32;
            let mut hits = 0.0f32;
            #[unroll]
            for p in 0..comptime![UNITS as usize / 32] {
                before += select(comptime![p as u32] < plane, totals[p], 0.0);
                hits += totals[p];
            }
            if hit > 0.5 {
                list[usize::cast_from(before + upto - 1.0)] = token;
            }
            sync_cube();
            let hits = u32::cast_from(hits);
            let mut i = 0u32;
            while i + AHEAD <= hits {
                let mut ahead = Array::<Vec8<E>>::new(comptime![AHEAD as usize]);
                #[unroll]
                for k in 0..comptime![AHEAD as usize] {
                    ahead[k] = gradient[(list[i as usize + k] * width + read) as usize];
                }
                #[unroll]
                for k in 0..comptime![AHEAD as usize] {
                    add_vector(&mut sums, ahead[k]);
                }
                i += AHEAD;
            }
            while i < hits {
                add_vector(&mut sums, gradient[(list[i as usize] * width + read) as usize]);
                i += 1;
            }
            found += hits;
            first += UNITS;
        }
        if column < width {
            let at = ((id - first_row) as u32 * width + column) as usize;
            let mut result = Vec8::<T>::empty();
            if comptime![add] {
                result = table[at];
            }
            #[unroll]
            for i in 0..8usize {
                let mut sum = sums[i];
                if comptime![add] {
                    sum += f32::cast_from(result.extract(i));
                }
                result.insert(i, T::cast_from(sum));
            }
            table[at] = result;
        }
    }
}

/// `out [ids, hidden]` from `table [rows, hidden]`, numbers of `bytes` bytes without gaps; zero for an id outside. Ids are
/// `i32`.
pub fn forward(
    client: &Client,
    table: &Handle,
    ids: &Handle,
    out: &Handle,
    shape: TableShape,
    bytes: usize,
) -> Result<(), PointwiseError> {
    shape.check()?;
    check("bytes of a row", shape.hidden * bytes, 16, 16 * LONGEST)?;
    let width = shape.hidden * bytes / 16;
    let (table, ids) = (buffer("table", table, shape.rows * width, 16)?, buffer("ids", ids, shape.ids, 4)?);
    let out = buffer("out", out, shape.ids * width, 16)?;
    // SAFETY: rows are in the table, every unit stays in its row, and the buffers hold all rows.
    unsafe {
        gather::launch_unchecked(
            client,
            CubeCount::Static(shape.ids as u32, (width as u32).div_ceil(UNITS), 1),
            CubeDim::new_1d(UNITS),
            table,
            ids,
            out,
            width as u32,
            shape.rows as u32,
            shape.first_row as i32,
        )
    };
    Ok(())
}

/// The gradient of the table, given that of `out` (type `E`): with `add` it is added to `table` (type `T`), else the rows
/// that have tokens are overwritten and the others left as they are.
pub fn backward<E: Float, T: Float>(
    client: &Client,
    gradient: &Handle,
    ids: &Handle,
    table: &Handle,
    shape: TableShape,
    add: bool,
) -> Result<(), PointwiseError> {
    shape.check()?;
    let width = shape.hidden / 8;
    let counts = client.empty(4 * shape.ids);
    let count_buffer = || buffer("counts", &counts, shape.ids, 4);
    let id_buffer = || buffer("ids", ids, shape.ids, 4);
    let gradient = buffer("gradient", gradient, shape.ids * width, 8 * size_of::<E>())?;
    let table = buffer("table", table, shape.rows * width, 8 * size_of::<T>())?;
    let (tokens, first_row) = (shape.ids as u32, shape.first_row as i32);
    // SAFETY: rows are in the table, every unit stays in its row, and the buffers hold all rows.
    unsafe {
        count_equals::launch_unchecked(
            client,
            CubeCount::Static(tokens, 1, 1),
            CubeDim::new_1d(UNITS),
            id_buffer()?,
            count_buffer()?,
            tokens,
            shape.rows as u32,
            first_row,
        );
        sum_equals::launch_unchecked::<E, T>(
            client,
            CubeCount::Static(tokens, (width as u32).div_ceil(UNITS), 1),
            CubeDim::new_1d(UNITS),
            gradient,
            id_buffer()?,
            count_buffer()?,
            table,
            width as u32,
            tokens,
            first_row,
            add,
        );
    }
    Ok(())
}
