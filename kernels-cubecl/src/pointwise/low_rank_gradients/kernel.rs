//! The pass over `dy`.
//!
//! A cube has a band of columns and goes through its rows in tiles of 16. Each plane has some of the columns, a ring of its
//! own that TMA fills, its part of `w` and the sums for it in registers. It reads a tile twice from shared memory: as the
//! left operand of `dx = dy · w`, whose parts the planes of a cube add up tile by tile, and transposed as the left operand
//! of `dw = dyᵀ · x`.
use super::operands::{LINE, PANEL, PITCH, ROWS, Ring, left_of, left_turned, load, read_x, store_x, tile_len, weights};
use super::{Out, Plan};
use crate::attention::portable::mma::tile::{Acc2, Pair, accumulators, multiply};
use crate::fp8::Codec;
use crate::fp8::amax::greatest;
use crate::fp8::cast::{Sixteen, quarter};
use crate::hopper::barrier::barrier_at;
use crate::pointwise::{CubeShape, Vec8, cube_max};
use cubecl::prelude::*;

/// Cube `(bands of columns, parts of the rows)`.
#[cube(launch_unchecked)]
pub fn low_rank_gradients<E: Float>(
    dy: &TensorMap<E, Tiled>,
    x: &[E],
    w: &[E],
    scale: &[f32],
    dx_parts: &mut [Acc2],
    dw_parts: &mut [Acc2],
    maxima: &mut [f32],
    cast: &mut [Sixteen],
    rows: u32,
    columns: u32,
    bands_of_block: u32,
    #[comptime] plan: Plan,
) {
    let (stages, pairs) = comptime![(plan.stages as u32, 8 * plan.steps as u32)];
    let slots = comptime![plan.planes * plan.stages];
    let plane = plane_broadcast(UNIT_POS / 32, 0u32);
    let (lane, group, t) = (UNIT_POS % 32, UNIT_POS % 32 / 4, UNIT_POS % 4);
    let mut ring = Ring::<E> {
        tiles: Shared::<[Vec8<E>]>::new_aligned_slice(comptime![slots * tile_len(plan)], 1024usize),
        full: Shared::<[u64]>::new_slice(slots),
    };
    let mut short = Shared::<[Pair<E>]>::new_slice(comptime![2 * 16 * plan.steps * PITCH]);
    let mut sums = Shared::<[Acc2]>::new_slice(comptime![2 * plan.planes * ROWS * 8 * plan.steps]);
    if UNIT_POS == 0 {
        #[unroll]
        for slot in 0..slots {
            barrier_at(&ring.full, slot).init_manual(1);
        }
    }
    sync_async_proxy_shared();
    sync_cube();
    let first = (CUBE_POS_X * comptime![plan.planes as u32] + plane) * comptime![(plan.panels() * PANEL) as u32];
    let block = CUBE_POS_X / bands_of_block;
    let tiles = rows / comptime![ROWS as u32];
    let start = tiles / CUBE_COUNT_Y * CUBE_POS_Y + min(CUBE_POS_Y, tiles % CUBE_COUNT_Y);
    let next = CUBE_POS_Y + 1;
    let end = tiles / CUBE_COUNT_Y * next + min(next, tiles % CUBE_COUNT_Y);
    if lane == 0 {
        #[unroll]
        for nth in 0..stages {
            if start + nth < end {
                load::<E>(&mut ring, dy, plane, nth, start + nth, first, plan);
            }
        }
    }
    let of_w = weights::<E>(w, first, plan);
    let mut of_dw = accumulators(comptime![plan.panels() * 4 * 2 * plan.steps * 8]);
    let mut top = 0.0f32;
    let factor = scale[0];
    let own = read_x::<E>(x, start, block, plan);
    store_x::<E>(&own, &mut short, 0u32, plan);
    sync_cube();
    let mut tile = start;
    while tile < end {
        let nth = tile - start;
        let slot = plane * stages + nth % stages;
        // `x` and sums are in one of two places each, so that the planes wait for each other once a tile.
        let turn = nth % 2;
        let of_short = turn * comptime![(16 * plan.steps * PITCH) as u32];
        let of_sums = turn * comptime![(plan.planes * ROWS * 8 * plan.steps) as u32];
        let next_x = read_x::<E>(x, min(tile + 1, end - 1), block, plan);
        let mut of_dx = accumulators(comptime![16 * plan.steps]);
        barrier_at(&ring.full, slot as usize).wait_parity(nth / stages % 2);
        // Vector `v` of row `r` of a panel lies at `v xor r mod 8`.
        #[unroll]
        for p in 0..comptime![plan.panels()] {
            let panel = slot * comptime![tile_len(plan) as u32] + comptime![p as u32 * ROWS as u32 * LINE];
            let mut upper_cast = Sixteen::empty();
            let mut lower_cast = Sixteen::empty();
            #[unroll]
            for s in 0..2usize {
                let at = panel + group * LINE + ((2 * t + comptime![s as u32]) ^ group);
                let upper = ring.tiles[at as usize];
                let lower = ring.tiles[(at + 8 * LINE) as usize];
                if comptime![plan.out == Out::Amax] {
                    top = greatest::<E>(lower, greatest::<E>(upper, top));
                }
                if let Out::Cast(format) = comptime![plan.out] {
                    #[unroll]
                    for i in 0..2usize {
                        let to = comptime![2 * s + i];
                        upper_cast
                            .insert(to, quarter::<E>(upper, factor, comptime![4 * i], format, Codec::Instruction));
                        lower_cast
                            .insert(to, quarter::<E>(lower, factor, comptime![4 * i], format, Codec::Instruction));
                    }
                }
                #[unroll]
                for h in 0..2usize {
                    let left = left_of::<E>(upper, lower, h);
                    #[unroll]
                    for n in 0..comptime![2 * plan.steps] {
                        let right = comptime![((p * 2 + s) * 2 + h) * 2 * plan.steps + n];
                        multiply(of_dx.index_mut(n), &left, of_w.index(right));
                    }
                }
            }
            if comptime![plan.is_cast()] {
                let width = columns / 16;
                let column = first / 16 + comptime![(p * PANEL / 16) as u32] + t;
                let to = (tile * comptime![ROWS as u32] + group) * width + column;
                cast[to as usize] = upper_cast;
                cast[(to + 8 * width) as usize] = lower_cast;
            }
            // Rows 2 t, 2 t + 1, and 8 below.
            let even = panel + 2 * t * LINE + (group ^ (2 * t));
            let odd = panel + (2 * t + 1) * LINE + (group ^ (2 * t + 1));
            let mut four = Array::<Vec8<E>>::new(4usize);
            #[unroll]
            for below in 0..2usize {
                let down = comptime![8 * below as u32 * LINE];
                four[comptime![2 * below]] = ring.tiles[(even + down) as usize];
                four[comptime![2 * below + 1]] = ring.tiles[(odd + down) as usize];
            }
            #[unroll]
            for n in 0..comptime![2 * plan.steps] {
                let from = of_short + (comptime![8 * n as u32] + group) * comptime![PITCH as u32] + t;
                let mut right = Array::<Pair<E>>::new(2usize);
                right[0] = short[from as usize];
                right[1] = short[(from + 4) as usize];
                #[unroll]
                for j in 0..4usize {
                    let left = left_turned::<E>(&four, j);
                    multiply(of_dw.index_mut(comptime![(p * 4 + j) * 2 * plan.steps + n]), &left, &right);
                }
            }
        }
        sync_plane();
        if lane == 0 && tile + stages < end {
            load::<E>(&mut ring, dy, plane, nth, tile + stages, first, plan);
        }
        #[unroll]
        for n in 0..comptime![2 * plan.steps] {
            let at = of_sums + (plane * comptime![ROWS as u32] + group) * pairs + comptime![4 * n as u32] + t;
            sums[at as usize] = of_dx.index(n)[0];
            sums[(at + comptime![8 * 8 * plan.steps as u32]) as usize] = of_dx.index(n)[1];
        }
        store_x::<E>(&next_x, &mut short, comptime![(16 * plan.steps * PITCH) as u32] - of_short, plan);
        sync_cube();
        let mut item = UNIT_POS;
        while item < comptime![ROWS as u32 * 8 * plan.steps as u32] {
            let from = (of_sums + item) as usize;
            let mut sum = sums[from];
            #[unroll]
            for other in 1..plan.planes {
                sum += sums[from + comptime![other * ROWS * 8 * plan.steps]];
            }
            let row = CUBE_POS_X * rows + tile * comptime![ROWS as u32];
            dx_parts[(row * pairs + item) as usize] = sum;
            item += comptime![32 * plan.planes as u32];
        }
        tile += 1;
    }
    #[unroll]
    for i in 0..comptime![plan.panels() * 4 * 2 * plan.steps] {
        let (p, j, n) = comptime![(i / (8 * plan.steps), i / (2 * plan.steps) % 4, i % (2 * plan.steps))];
        let column = CUBE_POS_Y * columns + first + 8 * group + comptime![(p * PANEL + 2 * j) as u32];
        let at = column * pairs + comptime![4 * n as u32] + t;
        dw_parts[at as usize] = of_dw.index(i)[0];
        dw_parts[(at + pairs) as usize] = of_dw.index(i)[1];
    }
    if comptime![plan.out == Out::Amax] {
        let mut scratch = Shared::<[f32]>::new_slice(plan.planes);
        let cube = comptime![CubeShape { units: 32 * plan.planes as u32, plane: 32 }];
        let top = cube_max(top, &mut scratch, cube);
        if UNIT_POS == 0 {
            maxima[(CUBE_POS_Y * CUBE_COUNT_X + CUBE_POS_X) as usize] = top;
        }
    }
}
