//! The gradient of a table: tokens are sorted by id, then every chunk of them is added up on its own.
//!
//! Ids that reach over a chunk's end leave their shares behind, which a last pass adds up. So a frequent id costs no more
//! than others, nothing is added atomically, and the same tokens give the same bits, however the table is split.
use super::TableShape;
use super::sort::{Order, sort};
use crate::pointwise::cube::cube_sums;
use crate::pointwise::{CubeShape, F32x4, PointwiseError, buffer};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Tokens of a chunk.
const CHUNK: u32 = 16;
/// Rows that are read at a time.
const AHEAD: u32 = 4;
/// Shares that are read at a time.
const JOINED: u32 = 8;

/// Four numbers of a row.
type Four<E> = Vector<E, Const<4>>;

/// What is done about a place in the order: nothing, as its id is not in the table.
const SKIP: u32 = 0;
/// Its gradient is added to the sum, which goes on.
const ADD: u32 = 1;
/// The sum ends and belongs to the table.
const END: u32 = 2;
/// The sum ends, but began before the chunk.
const END_SHARE: u32 = 3;

/// Adds this unit's vector of a row to a sum.
#[cube]
fn add<E: Float>(sum: F32x4, value: Four<E>) -> F32x4 {
    sum + F32x4::cast_from(value)
}

/// Cube `(chunk, vectors)`. The sum of an id that began before the chunk, and ends in it, becomes the first of the chunk's
/// two `shares`, that of one that goes on behind the chunk the second.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn sum_chunks<E: Float, T: Float>(
    gradient: &[Four<E>],
    order: &[u32],
    sorted: &[i32],
    table: &mut [Four<T>],
    shares: &mut [F32x4],
    width: u32,
    tokens: u32,
    rows: u32,
    first_row: i32,
    #[comptime] adds: bool,
) {
    let mut steps = Shared::<[u32]>::new_slice(CHUNK as usize);
    let mut from = Shared::<[u32]>::new_slice(CHUNK as usize);
    let mut to = Shared::<[u32]>::new_slice(CHUNK as usize);
    let begin = CUBE_POS_X * CHUNK;
    let mut own = UNIT_POS;
    while own < CHUNK {
        // Places behind the last token are skipped; all reads are on their way at once.
        let place = min(begin + own, tokens - 1);
        let id = sorted[place as usize];
        let next = sorted[min(place + 1, tokens - 1) as usize];
        let previous = sorted[max(begin, 1) as usize - 1];
        from[own as usize] = order[place as usize];
        // An id in front of the table wraps around to a row behind it.
        let row = (id - first_row) as u32;
        to[own as usize] = row;
        let began_before = begin > 0 && previous == id;
        let mut step = select(began_before, END_SHARE, END);
        step = select(place + 1 < tokens && next == id, ADD, step);
        step = select(begin + own < tokens && row < rows, step, SKIP);
        steps[own as usize] = step;
        own += CUBE_DIM_X;
    }
    sync_cube();
    let column = CUBE_POS_Y * CUBE_DIM_X + UNIT_POS;
    if column < width {
        let share = CUBE_POS_X * 2 * width + column;
        let mut sum = F32x4::new(0.0);
        let mut first = 0u32;
        while first < CHUNK {
            let mut ahead = Array::<Four<E>>::new(comptime![AHEAD as usize]);
            let mut before = Array::<Four<T>>::new(comptime![AHEAD as usize]);
            #[unroll]
            for k in 0..comptime![AHEAD as usize] {
                let place = first as usize + k;
                let step = steps[place];
                if step != SKIP {
                    ahead[k] = gradient[(from[place] * width + column) as usize];
                }
                if comptime![adds] {
                    if step == END {
                        before[k] = table[(to[place] * width + column) as usize];
                    }
                }
            }
            #[unroll]
            for k in 0..comptime![AHEAD as usize] {
                let place = first as usize + k;
                let step = steps[place];
                if step != SKIP {
                    sum = add(sum, ahead[k]);
                    if step == END {
                        if comptime![adds] {
                            sum = add(sum, before[k]);
                        }
                        table[(to[place] * width + column) as usize] = Four::<T>::cast_from(sum);
                    }
                    if step == END_SHARE {
                        shares[share as usize] = sum;
                    }
                    if step != ADD {
                        sum = F32x4::new(0.0);
                    }
                }
            }
            first += AHEAD;
        }
        if steps[comptime![CHUNK as usize - 1]] == ADD {
            shares[(share + width) as usize] = sum;
        }
    }
}

/// Cube `(chunk, vectors)`: adds up the shares of the id that begins in the chunk and goes on behind it, if there is one.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn join_chunks<T: Float>(
    shares: &[F32x4],
    sorted: &[i32],
    table: &mut [Four<T>],
    width: u32,
    tokens: u32,
    rows: u32,
    first_row: i32,
    #[comptime] adds: bool,
    #[comptime] cube: CubeShape,
) {
    let mut scratch = Shared::<[f32]>::new_slice(comptime![cube.scratch()]);
    let column = CUBE_POS_Y * CUBE_DIM_X + UNIT_POS;
    let begin = CUBE_POS_X * CHUNK;
    let behind = begin + CHUNK;
    // Where the chunk after the next begins, and for other units the chunks behind that.
    let mut after = behind + (UNIT_POS + 1) * CHUNK;
    let last_id = tokens - 1;
    // All are on their way at once.
    let id = sorted[min(behind - 1, last_id) as usize];
    let next = sorted[min(behind, last_id) as usize];
    let previous = sorted[max(begin, 1) as usize - 1];
    let mut later = sorted[min(after, last_id) as usize];
    let row = (id - first_row) as u32;
    // An id that fills the chunk from before on belongs to the chunk where it begins.
    let filled = begin > 0 && previous == id;
    if behind < tokens && next == id && row < rows && !filled {
        // Chunks that the id fills: behind them it goes on. As many looks at a time as there are units.
        let mut full = 0u32;
        let mut turn = 0u32;
        let mut more = true;
        while more {
            let goes_on = select(after < tokens && later == id, 1.0f32, 0.0f32);
            let (found, _) = cube_sums(goes_on, 0.0f32, &mut scratch, turn, cube);
            full += found as u32;
            more = found as u32 == comptime![cube.units];
            turn = 1 - turn;
            after += comptime![cube.units * CHUNK];
            if more {
                later = sorted[min(after, last_id) as usize];
            }
        }
        if column < width {
            let first = CUBE_POS_X + 1;
            let mut sum = shares[((CUBE_POS_X * 2 + 1) * width + column) as usize];
            let mut at = 0u32;
            while at <= full {
                let mut ahead = Array::<F32x4>::new(comptime![JOINED as usize]);
                #[unroll]
                for k in 0..comptime![JOINED as usize] {
                    let chunk = at + comptime![k as u32];
                    ahead[k] = F32x4::new(0.0);
                    if chunk <= full {
                        // Chunks that the id fills have it as their second share, the one that it leaves as its first.
                        let which = select(chunk < full, 1u32, 0u32);
                        ahead[k] = shares[(((first + chunk) * 2 + which) * width + column) as usize];
                    }
                }
                #[unroll]
                for k in 0..comptime![JOINED as usize] {
                    sum += ahead[k];
                }
                at += JOINED;
            }
            let at = (row * width + column) as usize;
            if comptime![adds] {
                sum = add(sum, table[at]);
            }
            table[at] = Four::<T>::cast_from(sum);
        }
    }
}

/// Units of a cube of the sums: many small cubes end at about the same time.
fn summing_units(cube: CubeShape) -> u32 {
    (cube.units / 2).max(1)
}

/// The gradient of the table, given that of the rows (type `E`): with `add` it is added to `table` (type `T`), else the
/// rows that have tokens are overwritten and the others left as they are.
///
/// # Errors
/// If there is no kernel for the shape, or a buffer is too short.
pub fn backward<E: Float, T: Float>(
    client: &Client,
    gradient: &Handle,
    ids: &Handle,
    table: &Handle,
    shape: TableShape,
    add: bool,
) -> Result<(), PointwiseError> {
    let units = summing_units(CubeShape::of(client));
    backward_in::<E, T>(client, gradient, ids, table, shape, add, units)
}

/// [`backward`] with sums by cubes of so many units.
///
/// # Errors
/// As [`backward`].
pub fn backward_in<E: Float, T: Float>(
    client: &Client,
    gradient: &Handle,
    ids: &Handle,
    table: &Handle,
    shape: TableShape,
    add: bool,
    units: u32,
) -> Result<(), PointwiseError> {
    shape.check()?;
    let (cube, width) = (CubeShape::of(client), shape.hidden / 4);
    let (chunks, summing) = (shape.ids.div_ceil(CHUNK as usize), CubeShape { units, ..cube });
    let shares = client.empty(2 * chunks * shape.hidden * 4);
    let gradient = buffer("gradient", gradient, shape.ids * width, 4 * size_of::<E>())?;
    let table_buffer = || buffer("table", table, shape.rows * width, 4 * size_of::<T>());
    table_buffer()?;
    let Order { order, sorted } = sort(client, ids, shape.ids)?;
    let sorted_buffer = || buffer("sorted ids", &sorted, shape.ids, 4);
    let share_buffer = || buffer("shares", &shares, 2 * chunks * width, 16);
    let (tokens, rows, first_row) = (shape.ids as u32, shape.rows as u32, shape.first_row as i32);
    // SAFETY: rows are in the table, every unit stays in its column of rows and shares, and the buffers hold them all.
    unsafe {
        sum_chunks::launch_unchecked::<E, T>(
            client,
            summing.rows(chunks, width),
            summing.dim(),
            gradient,
            buffer("order", &order, shape.ids, 4)?,
            sorted_buffer()?,
            table_buffer()?,
            share_buffer()?,
            width as u32,
            tokens,
            rows,
            first_row,
            add,
        );
        join_chunks::launch_unchecked::<T>(
            client,
            cube.rows(chunks, width),
            cube.dim(),
            share_buffer()?,
            sorted_buffer()?,
            table_buffer()?,
            width as u32,
            tokens,
            rows,
            first_row,
            add,
            cube,
        );
    }
    Ok(())
}
