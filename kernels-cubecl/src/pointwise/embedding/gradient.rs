//! The gradient of a table: tokens are sorted by id, then every chunk of them is added up on its own.
//!
//! Ids that reach over a chunk's end leave their shares behind, which a last pass adds up. So a frequent id costs no more
//! than others, nothing is added atomically, and the same tokens give the same bits, however the table is split.
use super::TableShape;
use crate::pointwise::{CubeShape, PointwiseError, Vec8, buffer};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Tokens of a chunk.
const CHUNK: u32 = 16;
/// Rows that are read at a time.
const AHEAD: u32 = 4;
/// Tokens that a cube sorts in.
const SORTED: u32 = 32;

/// Planes, or on the cpu runtime units, that share the comparisons of a cube's tokens.
fn lanes(cube: CubeShape) -> u32 {
    (cube.units / SORTED).max(1)
}

/// Tokens of a cube.
fn own(cube: CubeShape) -> u32 {
    cube.units / lanes(cube)
}

/// How many ids of a vector are smaller than `id`, or with `equal` not greater.
#[cube]
fn smaller(quad: Vector<i32, Const<4>>, id: i32, #[comptime] equal: bool) -> u32 {
    let mut found = 0u32;
    #[unroll]
    for k in 0..4usize {
        let other = quad.extract(k);
        if comptime![equal] {
            found += select(other <= id, 1u32, 0u32);
        } else {
            found += select(other < id, 1u32, 0u32);
        }
    }
    found
}

/// Writes every token and its id to its place in the order of ids; tokens of an id stay in theirs. `quads` are the whole
/// vectors of `ids`.
#[cube(launch_unchecked)]
pub fn sort_tokens(
    ids: &[i32],
    quads: &[Vector<i32, Const<4>>],
    order: &mut [u32],
    sorted: &mut [i32],
    tokens: u32,
    #[comptime] cube: CubeShape,
) {
    let mut shares = Shared::<[u32]>::new_slice(comptime![cube.units as usize]);
    let own = comptime![own(cube)];
    let lanes = comptime![lanes(cube)];
    let token = CUBE_POS_X * own + UNIT_POS % own;
    let id = ids[min(token, tokens - 1) as usize];
    // Each lane compares with a run of whole vectors, the last with what is left.
    let share = (tokens + 4 * lanes - 1) / (4 * lanes) * 4;
    let mut other = UNIT_POS / own * share;
    let end = min(other + share, tokens);
    let mut before = 0u32;
    // In front of the token stand smaller ids, and equal ones of tokens before it.
    while other + 4 <= min(token, end) {
        before += smaller(quads[(other / 4) as usize], id, true);
        other += 4;
    }
    let mixed = min(other + 4, end);
    while other < mixed {
        let found = ids[other as usize];
        before += select(found < id || (found == id && other < token), 1u32, 0u32);
        other += 1;
    }
    while other + 4 <= end {
        before += smaller(quads[(other / 4) as usize], id, false);
        other += 4;
    }
    while other < end {
        before += select(ids[other as usize] < id, 1u32, 0u32);
        other += 1;
    }
    shares[UNIT_POS as usize] = before;
    sync_cube();
    if UNIT_POS < own && token < tokens {
        let mut place = 0u32;
        #[unroll]
        for lane in 0..comptime![lanes as usize] {
            place += shares[UNIT_POS as usize + comptime![lane * own as usize]];
        }
        order[place as usize] = token;
        sorted[place as usize] = id;
    }
}

/// Adds this unit's vector of a row to `sums`.
#[cube]
fn add_vector<E: Float>(sums: &mut Array<f32>, value: Vec8<E>) {
    #[unroll]
    for i in 0..8usize {
        sums[i] = sums[i] + f32::cast_from(value.extract(i));
    }
}

/// Ends a sum: writes it to a row of the table, or adds it to that.
#[cube]
fn write_row<T: Float>(table: &mut [Vec8<T>], at: u32, sums: &Array<f32>, #[comptime] add: bool) {
    let mut result = Vec8::<T>::empty();
    if comptime![add] {
        result = table[at as usize];
    }
    #[unroll]
    for i in 0..8usize {
        let mut sum = sums[i];
        if comptime![add] {
            sum += f32::cast_from(result.extract(i));
        }
        result.insert(i, T::cast_from(sum));
    }
    table[at as usize] = result;
}

#[cube]
fn write_share(shares: &mut [Vec8<f32>], at: u32, sums: &Array<f32>) {
    let mut result = Vec8::<f32>::empty();
    #[unroll]
    for i in 0..8usize {
        result.insert(i, sums[i]);
    }
    shares[at as usize] = result;
}

#[cube]
fn clear(sums: &mut Array<f32>) {
    #[unroll]
    for i in 0..8usize {
        sums[i] = 0.0;
    }
}

/// Cube `(chunk, vectors)`. The sum of an id that began before the chunk, and ends in it, becomes the first of the chunk's
/// two `shares`, that of one that goes on behind the chunk the second.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn sum_chunks<E: Float, T: Float>(
    gradient: &[Vec8<E>],
    order: &[u32],
    sorted: &[i32],
    table: &mut [Vec8<T>],
    shares: &mut [Vec8<f32>],
    width: u32,
    tokens: u32,
    rows: u32,
    first_row: i32,
    #[comptime] add: bool,
) {
    let column = CUBE_POS_Y * CUBE_DIM_X + UNIT_POS;
    if column < width {
        let begin = CUBE_POS_X * CHUNK;
        let end = min(begin + CHUNK, tokens);
        let share = CUBE_POS_X * 2 * width + column;
        let mut began_before = false;
        if begin > 0 {
            began_before = sorted[begin as usize - 1] == sorted[begin as usize];
        }
        let mut sums = Array::<f32>::new(8usize);
        clear(&mut sums);
        let mut goes_on = false;
        let mut first = begin;
        while first < end {
            let mut ahead = Array::<Vec8<E>>::new(comptime![AHEAD as usize]);
            #[unroll]
            for k in 0..comptime![AHEAD as usize] {
                let place = first + comptime![k as u32];
                // An id in front of the table wraps around to a row behind it.
                if place < end && ((sorted[place as usize] - first_row) as u32) < rows {
                    ahead[k] = gradient[(order[place as usize] * width + column) as usize];
                }
            }
            #[unroll]
            for k in 0..comptime![AHEAD as usize] {
                let place = first + comptime![k as u32];
                if place < end {
                    let id = sorted[place as usize];
                    let row = (id - first_row) as u32;
                    goes_on = false;
                    if place + 1 < tokens {
                        goes_on = sorted[place as usize + 1] == id;
                    }
                    if row < rows {
                        add_vector(&mut sums, ahead[k]);
                        if !goes_on {
                            if began_before {
                                write_share(shares, share, &sums);
                            } else {
                                write_row(table, row * width + column, &sums, add);
                            }
                            clear(&mut sums);
                        }
                    }
                    began_before = began_before && goes_on;
                }
            }
            first += AHEAD;
        }
        if goes_on {
            write_share(shares, share + width, &sums);
        }
    }
}

/// Cube `(chunk, vectors)`: adds up the shares of the id that begins in the chunk and goes on behind it, if there is one.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn join_chunks<T: Float>(
    shares: &[Vec8<f32>],
    sorted: &[i32],
    table: &mut [Vec8<T>],
    width: u32,
    tokens: u32,
    rows: u32,
    first_row: i32,
    #[comptime] add: bool,
) {
    let column = CUBE_POS_Y * CUBE_DIM_X + UNIT_POS;
    let begin = CUBE_POS_X * CHUNK;
    let behind = begin + CHUNK;
    if column < width && behind < tokens {
        let id = sorted[behind as usize - 1];
        let row = (id - first_row) as u32;
        // An id that fills the chunk from before on belongs to the chunk where it begins.
        let mut begins_here = sorted[behind as usize] == id && row < rows;
        if begins_here && begin > 0 && sorted[begin as usize] == id {
            begins_here = sorted[begin as usize - 1] != id;
        }
        if begins_here {
            let mut sums = Array::<f32>::new(8usize);
            clear(&mut sums);
            add_vector(&mut sums, shares[((CUBE_POS_X * 2 + 1) * width + column) as usize]);
            let mut chunk = CUBE_POS_X + 1;
            let mut next = behind + CHUNK;
            // Four chunks that the id fills are read at a time.
            let mut four = true;
            while four {
                four = false;
                let last = next + 3 * CHUNK;
                if last < tokens {
                    four = sorted[last as usize] == id;
                }
                if four {
                    let at = (chunk * 2 + 1) * width + column;
                    let (a, b) = (shares[at as usize], shares[(at + 2 * width) as usize]);
                    let (c, d) = (shares[(at + 4 * width) as usize], shares[(at + 6 * width) as usize]);
                    add_vector(&mut sums, a);
                    add_vector(&mut sums, b);
                    add_vector(&mut sums, c);
                    add_vector(&mut sums, d);
                    chunk += 4;
                    next += 4 * CHUNK;
                }
            }
            let mut goes_on = true;
            while goes_on {
                goes_on = false;
                if next < tokens {
                    goes_on = sorted[next as usize] == id;
                }
                // A chunk that the id leaves has it as its first share.
                let which = select(goes_on, 1u32, 0u32);
                add_vector(&mut sums, shares[((chunk * 2 + which) * width + column) as usize]);
                chunk += 1;
                next += CHUNK;
            }
            write_row(table, row * width + column, &sums, add);
        }
    }
}

/// The gradient of the table, given that of the rows (type `E`): with `add` it is added to `table` (type `T`), else the
/// rows that have tokens are overwritten and the others left as they are.
///
/// `ids` begin at a multiple of 16 bytes.
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
    shape.check()?;
    let (cube, width) = (CubeShape::of(client), shape.hidden / 8);
    let chunks = shape.ids.div_ceil(CHUNK as usize);
    let (order, sorted) = (client.empty(4 * shape.ids), client.empty(4 * shape.ids));
    let shares = client.empty(2 * chunks * shape.hidden * 4);
    let order_buffer = || buffer("order", &order, shape.ids, 4);
    let sorted_buffer = || buffer("sorted ids", &sorted, shape.ids, 4);
    let share_buffer = || buffer("shares", &shares, 2 * chunks * width, 32);
    let table_buffer = || buffer("table", table, shape.rows * width, 8 * size_of::<T>());
    let gradient = buffer("gradient", gradient, shape.ids * width, 8 * size_of::<E>())?;
    let (quads, ids) = (buffer("ids", ids, shape.ids / 4, 16)?, buffer("ids", ids, shape.ids, 4)?);
    let (tokens, rows, first_row) = (shape.ids as u32, shape.rows as u32, shape.first_row as i32);
    // SAFETY: rows are in the table, every unit stays in its column of rows and shares, and the buffers hold them all.
    unsafe {
        sort_tokens::launch_unchecked(
            client,
            CubeCount::Static(tokens.div_ceil(own(cube)), 1, 1),
            cube.dim(),
            ids,
            quads,
            order_buffer()?,
            sorted_buffer()?,
            tokens,
            cube,
        );
        sum_chunks::launch_unchecked::<E, T>(
            client,
            cube.rows(chunks, width),
            cube.dim(),
            gradient,
            order_buffer()?,
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
        );
    }
    Ok(())
}
