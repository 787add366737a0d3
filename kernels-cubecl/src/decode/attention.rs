//! Attention of one query of each sequence over its pages. The keys of a sequence are split among cubes, whose partial
//! results are merged (Dao et al., Flash-Decoding, 2023): few sequences then keep the whole GPU busy.
#![allow(missing_docs, reason = "the launch macros write public items without documentation")]

use std::f32::consts::LOG2_E;

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::DecodeShape;
use super::merge::{NO_KEY, merge};
use crate::hopper::ptx;
use crate::pointwise::{CubeShape, PointwiseError, Vec8, buffer};

/// Keys that a unit has in flight.
const IN_FLIGHT: usize = 4;
/// Most query heads that share the loads of their keys in one cube.
const MOST_HEADS: usize = 4;
/// Most numbers of shared memory: 32 KiB.
const MOST_SHARED: usize = 8192;
/// Most splits of a sequence.
const MOST_SPLITS: usize = 64;
/// Fewest keys that are worth a split.
const SPLIT: usize = 64;

/// How a cube divides its keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Plan {
    /// Units of a cube.
    pub units: u32,
    /// Neighbouring units that share a key.
    pub lanes: u32,
    /// Vectors of a key that a unit has.
    pub vectors: u32,
    /// Query heads of a cube, all with the same keys.
    pub heads: u32,
    /// Positions of a page.
    pub block_size: u32,
}

impl Plan {
    /// For a device whose cubes have this shape.
    pub fn new(shape: DecodeShape, cube: CubeShape) -> Self {
        let units = cube.units.min(128);
        let vectors = shape.vectors() as u32;
        // A power of two, so that the neighbours of a plane can add up their parts.
        let lanes = (1 << vectors.trailing_zeros()).min(cube.plane);
        let fits = |heads: &usize| (units / lanes) as usize * heads * (shape.head_dim + 2) <= MOST_SHARED;
        let group = shape.heads / shape.kv_heads;
        let heads = (1..=MOST_HEADS).rev().filter(|heads| group.is_multiple_of(*heads)).find(fits).unwrap_or(1);
        let block_size = shape.block_size as u32;
        Self { units, lanes, vectors: vectors / lanes, heads: heads as u32, block_size }
    }

    /// Keys that a cube reads at the same time.
    fn groups(self) -> u32 {
        self.units / self.lanes
    }

    /// Numbers of a head.
    fn head_dim(self) -> u32 {
        8 * self.lanes * self.vectors
    }
}

/// The sum over the units that share a key, in all of them.
#[cube]
fn lanes_total(value: f32, #[comptime] plan: Plan) -> f32 {
    let mut total = value;
    #[unroll]
    for i in 0..comptime![plan.lanes.trailing_zeros()] {
        total += plane_shuffle_xor(total, comptime![1u32 << i]);
    }
    total
}

/// Cube `(split, key head × its groups of query heads, sequence)`. Scores are in units of `log2`.
#[cube(launch_unchecked)]
pub fn split_attention<E: Float>(
    qkv: &[Vec8<E>],
    keys: &[Vec8<E>],
    values: &[Vec8<E>],
    table: &[i32],
    lengths: &[i32],
    partials: &mut [f32],
    statistics: &mut [f32],
    scale: f32,
    window: u32,
    heads: u32,
    kv_heads: u32,
    max_blocks: u32,
    #[comptime] plan: Plan,
) {
    let (lanes, vectors, own, groups) = comptime![(plan.lanes, plan.vectors, plan.heads, plan.groups())];
    let head_dim = comptime![plan.head_dim()];
    let count = comptime![(own * 8 * vectors) as usize];
    let (lane, group) = (UNIT_POS % lanes, UNIT_POS / lanes);
    let sequence = CUBE_POS_Z;
    let first_head = CUBE_POS_Y * own;
    let kv_head = first_head / (heads / kv_heads);
    let of_head = comptime![lanes * vectors];

    let length = u32::cast_from(max(lengths[sequence as usize], 0));
    let mut visible = length;
    if window > 0 {
        visible = min(length, window);
    }
    let share = (visible + CUBE_COUNT_X - 1) / CUBE_COUNT_X;
    let start = length - visible + min(CUBE_POS_X * share, visible);
    let end = min(start + share, length);

    let mut q = Array::<f32>::new(count);
    let mut sums = Array::<f32>::new(count);
    let mut greatest = Array::<f32>::new(comptime![own as usize]);
    let mut weights = Array::<f32>::new(comptime![own as usize]);
    #[unroll]
    for h in 0..own {
        greatest[comptime![h as usize]] = f32::new(comptime![NO_KEY as f64]);
        weights[comptime![h as usize]] = 0.0f32;
        let row = (sequence * (heads + 2 * kv_heads) + first_head + h) * of_head;
        #[unroll]
        for v in 0..vectors {
            let vector = qkv[(row + v * lanes + lane) as usize];
            #[unroll]
            for i in 0..8u32 {
                let at = comptime![((h * vectors + v) * 8 + i) as usize];
                q[at] = f32::cast_from(vector.extract(comptime![i as usize])) * scale;
                sums[at] = 0.0f32;
            }
        }
    }

    let mut base = start;
    while base < end {
        let mut held_keys = Array::<Vec8<E>>::new(comptime![IN_FLIGHT * vectors as usize]);
        let mut held_values = Array::<Vec8<E>>::new(comptime![IN_FLIGHT * vectors as usize]);
        #[unroll]
        for k in 0..comptime![IN_FLIGHT as u32] {
            // No load depends on a condition: past the last key, that key is read again.
            let position = min(base + comptime![k * groups] + group, end - 1);
            let block_size = comptime![plan.block_size];
            let page = u32::cast_from(table[(sequence * max_blocks + position / block_size) as usize]);
            let row = ((page * block_size + position % block_size) * kv_heads + kv_head) * of_head;
            #[unroll]
            for v in 0..vectors {
                let slot = comptime![(k * vectors + v) as usize];
                held_keys[slot] = keys[(row + v * lanes + lane) as usize];
                held_values[slot] = values[(row + v * lanes + lane) as usize];
            }
        }
        #[unroll]
        for h in 0..own {
            let head = comptime![h as usize];
            let mut scores = Array::<f32>::new(IN_FLIGHT);
            let mut top = greatest[head];
            #[unroll]
            for k in 0..comptime![IN_FLIGHT as u32] {
                let mut dot = 0.0f32;
                #[unroll]
                for v in 0..vectors {
                    let vector = held_keys[comptime![(k * vectors + v) as usize]];
                    #[unroll]
                    for i in 0..8u32 {
                        let at = comptime![((h * vectors + v) * 8 + i) as usize];
                        dot += q[at] * f32::cast_from(vector.extract(comptime![i as usize]));
                    }
                }
                let score = lanes_total(dot, plan);
                let is_there = base + comptime![k * groups] + group < end;
                let score = select(is_there, score, f32::new(comptime![NO_KEY as f64]));
                scores[comptime![k as usize]] = score;
                top = max(top, score);
            }
            let correction = ptx::exp2(greatest[head] - top);
            greatest[head] = top;
            let mut weight = weights[head] * correction;
            #[unroll]
            for at in 0..comptime![8 * vectors] {
                sums[comptime![(h * 8 * vectors + at) as usize]] *= correction;
            }
            #[unroll]
            for k in 0..comptime![IN_FLIGHT as u32] {
                let is_there = base + comptime![k * groups] + group < end;
                let p = select(is_there, ptx::exp2(scores[comptime![k as usize]] - top), 0.0f32);
                weight += p;
                #[unroll]
                for v in 0..vectors {
                    let vector = held_values[comptime![(k * vectors + v) as usize]];
                    #[unroll]
                    for i in 0..8u32 {
                        let at = comptime![((h * vectors + v) * 8 + i) as usize];
                        sums[at] += p * f32::cast_from(vector.extract(comptime![i as usize]));
                    }
                }
            }
            weights[head] = weight;
        }
        base += comptime![IN_FLIGHT as u32 * groups];
    }

    // The groups of the cube add up, relative to the greatest score of all.
    let mut of_groups = Shared::<[f32]>::new_slice(comptime![(2 * groups * own) as usize]);
    let mut of_sums = Shared::<[f32]>::new_slice(comptime![(groups * own * head_dim) as usize]);
    if lane == 0 {
        #[unroll]
        for h in 0..own {
            of_groups[(group * own + h) as usize] = greatest[comptime![h as usize]];
            of_groups[(comptime![groups * own] + group * own + h) as usize] = weights[comptime![h as usize]];
        }
    }
    sync_cube();
    #[unroll]
    for h in 0..own {
        let mut top = of_groups[comptime![h as usize]];
        #[unroll]
        for g in 1..groups {
            top = max(top, of_groups[comptime![(g * own + h) as usize]]);
        }
        let correction = ptx::exp2(greatest[comptime![h as usize]] - top);
        #[unroll]
        for v in 0..vectors {
            #[unroll]
            for i in 0..8u32 {
                let to = (group * own + h) * head_dim + (v * lanes + lane) * 8 + i;
                of_sums[to as usize] = sums[comptime![((h * vectors + v) * 8 + i) as usize]] * correction;
            }
        }
    }
    sync_cube();
    let rows = CUBE_COUNT_Z * heads;
    let first_row = CUBE_POS_X * rows + sequence * heads + first_head;
    let mut item = UNIT_POS;
    while item < comptime![own * head_dim] {
        let mut sum = 0.0f32;
        #[unroll]
        for g in 0..groups {
            sum += of_sums[(comptime![g * own * head_dim] + item) as usize];
        }
        partials[(first_row * head_dim + item) as usize] = sum;
        item += comptime![plan.units];
    }
    let mut head = UNIT_POS;
    while head < own {
        let mut top = of_groups[head as usize];
        #[unroll]
        for g in 1..groups {
            top = max(top, of_groups[(comptime![g * own] + head) as usize]);
        }
        let mut weight = 0.0f32;
        #[unroll]
        for g in 0..groups {
            let at = comptime![g * own] + head;
            weight += of_groups[(comptime![groups * own] + at) as usize] * ptx::exp2(of_groups[at as usize] - top);
        }
        let row = 2 * (first_row + head);
        statistics[row as usize] = top;
        statistics[(row + 1) as usize] = weight;
        head += comptime![plan.units];
    }
}

/// `out [sequences, heads, head_dim]`: attention of the queries in the packed projection `qkv [sequences, heads + 2
/// kv_heads, head_dim]` over the positions of their sequences, with [`append`](super::append())'s buffers and types. Only
/// the last `window` positions are seen, if there is a window. A sequence of length 0 gets zeros.
///
/// # Errors
/// If there is no kernel for the shape, or a buffer is too small.
pub fn attention<E: Float>(
    client: &Client,
    shape: DecodeShape,
    (scale, window): (f64, Option<usize>),
    qkv: &Handle,
    [keys, values]: [&Handle; 2],
    [table, lengths]: [&Handle; 2],
    out: &Handle,
) -> Result<(), PointwiseError> {
    shape.refused()?;
    let plan = Plan::new(shape, CubeShape::of(client));
    let columns = shape.heads / plan.heads as usize;
    let cores = client.properties().hardware.num_streaming_multiprocessors.unwrap_or(1) as usize;
    let visible = window.unwrap_or(usize::MAX).min(shape.max_blocks * shape.block_size);
    let busy = (4 * cores).div_ceil(columns * shape.sequences);
    let splits = busy.min(visible.div_ceil(SPLIT)).clamp(1, MOST_SPLITS);
    let rows = shape.sequences * shape.heads;
    let [partials, statistics] = [shape.head_dim, 2].map(|each| client.empty(4 * splits * rows * each));
    let (bytes, sequences) = (8 * size_of::<E>(), shape.sequences);
    // SAFETY: every access is to the sequence's own rows and to pages that its table names; the buffers hold them.
    unsafe {
        launch_kernel!(split_attention<E>, client,
            CubeCount::Static(splits as u32, columns as u32, sequences as u32), CubeDim::new_1d(plan.units);
            buffer("qkv", qkv, shape.packed(), bytes)?, buffer("keys", keys, shape.paged(), bytes)?,
            buffer("values", values, shape.paged(), bytes)?,
            buffer("table", table, sequences * shape.max_blocks, 4)?, buffer("lengths", lengths, sequences, 4)?,
            buffer("partials", &partials, splits * rows * shape.head_dim, 4)?,
            buffer("statistics", &statistics, splits * rows * 2, 4)?;
            scale as f32 * LOG2_E, window.unwrap_or(0) as u32, shape.heads as u32, shape.kv_heads as u32,
            shape.max_blocks as u32; plan)
    };
    merge::<E>(client, shape, splits, [&partials, &statistics], out)
}
