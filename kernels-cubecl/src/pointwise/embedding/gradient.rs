//! The gradient of an embedding table in one launch: a cube takes a bucket of ids and some columns, finds the bucket's
//! tokens, sorts them by id and adds up their gradients.
//!
//! All cubes scan all ids, which costs little compared with the gradients: ids stay in the L1 cache, and while some
//! cubes of an SM scan, others wait for memory. So no order has to be written first, and nothing has to be merged
//! afterwards. The same tokens give the same bits, however the table is sharded.
use super::TableShape;
use super::list::{collect, same_id, sort};
use super::plan::Plan;
use crate::pointwise::{F32x4, PointwiseError, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Four numbers of a row.
type Four<E> = Vector<E, Const<4>>;

/// What to do with an entry. Skip it: its id is not in the table, or it belongs to other units.
const SKIP: u32 = 0;
/// Add its gradient to the current sum.
const ADD: u32 = 1;
/// Add it, and write the sum to the table: it is the last of its id.
const END: u32 = 2;
/// Add it; the sum ends here, but its id began among the entries of earlier units.
const END_HEAD: u32 = 3;

/// Adds this unit's vector of a row to a sum.
#[cube]
fn add<E: Float>(sum: F32x4, value: Four<E>) -> F32x4 {
    sum + F32x4::cast_from(value)
}

/// The table row of an entry's id; past the table for an id before it.
#[cube]
fn row_of(entry: u32, first_row: u32, #[comptime] plan: Plan) -> u32 {
    (entry >> comptime![plan.token_bits()]) * comptime![plan.buckets] + CUBE_POS_Y - first_row
}

/// Cube `(columns, bucket)`. Units with the same columns take equally many of the bucket's sorted entries. The sum of
/// an id that began among earlier units' entries goes to `heads`; the units where the id began add these sums up.
#[cube(launch_unchecked)]
pub fn sum_buckets<E: Float, T: Float, N: Size>(
    gradient: &[Four<E>],
    ids: &[Vector<i32, N>],
    table: &mut [Four<T>],
    width: u32,
    tokens: u32,
    rows: u32,
    first_row: u32,
    #[comptime] lanes: usize,
    #[comptime] adds: bool,
    #[comptime] plan: Plan,
) {
    let mut list = Shared::<[u32]>::new_slice(comptime![plan.max_tokens as usize + 4]);
    let mut heads = Shared::<[F32x4]>::new_slice(comptime![plan.units as usize]);
    let count = collect::<N>(ids, &mut list, CUBE_POS_Y, tokens, lanes, plan);
    if count > 0 {
        sort(&mut list, count, plan);
        let (side, groups) = comptime![(plan.side, plan.groups())];
        let column = CUBE_POS_X * side + UNIT_POS % side;
        let group = UNIT_POS / side;
        let each = (count + comptime![groups - 1]) / groups;
        let begin = min(group * each, count);
        let end = min(begin + each, count);
        let previous = list[(max(begin, 1) - 1) as usize];
        let mut sum = F32x4::new(0.0);
        // Where a unit reads when it needs nothing: no load depends on a condition.
        let anywhere = min(column, width - 1);
        let mut place = begin;
        while place < end {
            let first = list[place as usize];
            if place + plan.run <= end && same_id(first, list[(place + plan.run) as usize], plan) {
                // Frequent ids: only rows are read, so more of them at a time.
                if row_of(first, first_row, plan) < rows && column < width {
                    let mut held = Array::<Four<E>>::new(comptime![plan.run as usize]);
                    #[unroll]
                    for k in 0..comptime![plan.run as usize] {
                        let token = list[place as usize + k] & comptime![plan.max_tokens - 1];
                        held[k] = gradient[(token * width + column) as usize];
                    }
                    #[unroll]
                    for k in 0..comptime![plan.run as usize] {
                        sum = add(sum, held[k]);
                    }
                }
                place += plan.run;
            } else {
                let mut steps = Array::<u32>::new(comptime![plan.in_flight as usize]);
                let mut to = Array::<u32>::new(comptime![plan.in_flight as usize]);
                let mut held = Array::<Four<E>>::new(comptime![plan.in_flight as usize]);
                let mut before = Array::<Four<T>>::new(comptime![plan.in_flight as usize]);
                #[unroll]
                for k in 0..comptime![plan.in_flight as usize] {
                    let at = min(place + comptime![k as u32], end - 1);
                    let (entry, next) = (list[at as usize], list[at as usize + 1]);
                    let row = row_of(entry, first_row, plan);
                    let mut step = select(begin > 0 && same_id(entry, previous, plan), END_HEAD, END);
                    step = select(same_id(entry, next, plan), ADD, step);
                    let taken = place + comptime![k as u32] < end && row < rows && column < width;
                    step = select(taken, step, SKIP);
                    to[k] = row * width + column;
                    steps[k] = step;
                    let token = entry & comptime![plan.max_tokens - 1];
                    held[k] = gradient[select(step != SKIP, token * width + column, anywhere) as usize];
                    if comptime![adds] {
                        before[k] = table[select(step == END, to[k], anywhere) as usize];
                    }
                }
                #[unroll]
                for k in 0..comptime![plan.in_flight as usize] {
                    let step = steps[k];
                    if step != SKIP {
                        sum = add(sum, held[k]);
                        if step == END {
                            if comptime![adds] {
                                sum = add(sum, before[k]);
                            }
                            table[to[k] as usize] = Four::<T>::cast_from(sum);
                        }
                        if step == END_HEAD {
                            heads[UNIT_POS as usize] = sum;
                        }
                        if step != ADD {
                            sum = F32x4::new(0.0);
                        }
                    }
                }
                place += comptime![plan.in_flight];
            }
        }
        let last = list[(max(end, 1) - 1) as usize];
        let continues = begin < end && end < count && same_id(last, list[end as usize], plan);
        let began_before = begin > 0 && same_id(last, previous, plan);
        if continues && began_before {
            heads[UNIT_POS as usize] = sum;
        }
        sync_cube();
        let row = row_of(last, first_row, plan);
        if continues && !began_before && row < rows && column < width {
            let mut other = group + 1;
            let mut more = true;
            while more {
                sum += heads[(other * side + UNIT_POS % side) as usize];
                let behind = min((other + 1) * each, count);
                more = behind < count && same_id(last, list[behind as usize], plan);
                other += 1;
            }
            let at = (row * width + column) as usize;
            if comptime![adds] {
                sum = add(sum, table[at]);
            }
            table[at] = Four::<T>::cast_from(sum);
        }
    }
}

/// The gradient of the table, given that of the rows (type `E`). With `add` it is added to `table` (type `T`);
/// otherwise only rows with tokens are written, and all are expected to be zero before. More tokens than fit into one
/// launch are added in several, each of which rounds a table that is not fp32.
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
    backward_planned::<E, T>(client, gradient, ids, table, shape, add, Plan::of(client, shape))
}

/// [`backward`] with another plan.
pub fn backward_planned<E: Float, T: Float>(
    client: &Client,
    gradient: &Handle,
    ids: &Handle,
    table: &Handle,
    shape: TableShape,
    add: bool,
    plan: Plan,
) -> Result<(), PointwiseError> {
    shape.check()?;
    check("first_row + rows", shape.first_row + shape.rows, 1, plan.most_ids())?;
    let (width, hidden) = (shape.hidden / 4, shape.hidden);
    for first in (0..shape.ids).step_by(plan.max_tokens as usize) {
        let tokens = (shape.ids - first).min(plan.max_tokens as usize);
        let ids = ids.clone().offset_start(4 * first as u64);
        let rows = gradient.clone().offset_start((first * hidden * size_of::<E>()) as u64);
        let aligned = ids.offset_start.unwrap_or(0).is_multiple_of(16);
        let lanes = if aligned && tokens.is_multiple_of(4) { 4 } else { 1 };
        let gradient = buffer("gradient", &rows, tokens * width, 4 * size_of::<E>())?;
        let ids = buffer("ids", &ids, tokens / lanes, 4 * lanes)?;
        let table = buffer("table", table, shape.rows * width, 4 * size_of::<T>())?;
        // SAFETY: rows are in the table, every unit stays in its columns, and the buffers hold them all.
        unsafe {
            launch_kernel!(sum_buckets<E, T>, client,
                CubeCount::Static((width as u32).div_ceil(plan.side), plan.buckets, 1), CubeDim::new_1d(plan.units),
                lanes;
                gradient, ids, table; width as u32, tokens as u32, shape.rows as u32, shape.first_row as u32;
                lanes, add || first > 0, plan)
        };
    }
    Ok(())
}
