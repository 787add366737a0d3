//! The kernel of a program.
use super::plan::Plan;
use super::program::{Extent, Program};
use super::row::{Buffers, PerRow, load_row, one_row};
use cubecl::prelude::*;

/// A cube takes `side` rows at once or one of the `parts` of a row, `units` units each, and a unit every `units`-th vector of
/// its row. `width` is the number of a row's vectors, `total` that of all rows. Where rows are summed, a cube takes others
/// after these, and every line of units writes the sum of its rows.
#[cube(launch_unchecked)]
pub fn fused<E: Float, N: Size>(
    wide: &Buffers<f32, N>,
    half: &Buffers<E, N>,
    per_row: &PerRow,
    shares: &Sequence<u32>,
    scalars: &Sequence<f32>,
    draws: &Sequence<u32>,
    wide_out: &mut Buffers<f32, N>,
    half_out: &mut Buffers<E, N>,
    per_row_out: &mut PerRow,
    width: u32,
    total: u32,
    #[comptime] program: Program,
    #[comptime] plan: Plan,
) {
    let part = CUBE_POS_X % comptime![plan.parts];
    let unit = UNIT_POS % comptime![plan.units] + part * comptime![plan.units];
    let line = UNIT_POS / comptime![plan.units];
    let (scratch, count) = comptime![(plan.scratch(&program), program.sums() * plan.vectors)];
    // Each time the other half: a unit that is ahead must not write what others still read.
    let mut shared = Shared::<[f32]>::new_slice(comptime![(if count > 0 { 2 * scratch } else { scratch }).max(1)]);
    let mut sums = Array::<Vector<f32, N>>::new(comptime![count.max(1)]);
    let inputs = comptime![program.inputs.len() * plan.vectors];
    let mut loaded = Array::<Vector<f32, N>>::new(comptime![inputs.max(1)]);
    let row = CUBE_POS_X / comptime![plan.parts] * comptime![plan.side] + line;
    load_row(wide, half, per_row, shares, &mut loaded, width, total, row, unit, comptime![program.clone()], plan);
    if comptime![count == 0] {
        one_row(
            &loaded,
            scalars,
            draws,
            wide_out,
            half_out,
            per_row_out,
            &mut sums,
            &mut shared,
            0u32,
            width,
            total,
            row,
            unit,
            program,
            plan,
        );
    } else {
        #[unroll]
        for s in 0..count {
            sums[s] = Vector::<f32, N>::new(0.0);
        }
        let rows = total / width;
        let mut row = row;
        let mut offset = 0u32;
        while row < rows + line {
            let mut held = Array::<Vector<f32, N>>::new(comptime![inputs.max(1)]);
            #[unroll]
            for i in 0..inputs {
                held[i] = loaded[i];
            }
            // Before the cube waits for this row's sums.
            let next = row + CUBE_COUNT_X * comptime![plan.side];
            load_row(
                wide,
                half,
                per_row,
                shares,
                &mut loaded,
                width,
                total,
                next,
                unit,
                comptime![program.clone()],
                plan,
            );
            one_row(
                &held,
                scalars,
                draws,
                wide_out,
                half_out,
                per_row_out,
                &mut sums,
                &mut shared,
                offset,
                width,
                total,
                row,
                unit,
                comptime![program.clone()],
                plan,
            );
            row = next;
            offset = comptime![scratch as u32] - offset;
        }
        let first = (CUBE_POS_X * comptime![plan.side] + line) * width;
        #[unroll]
        for o in 0..comptime![program.outputs.len()] {
            if comptime![program.outputs[o].extent == Extent::PerColumn] {
                #[unroll]
                for v in 0..comptime![plan.vectors] {
                    let column = unit + comptime![v as u32 * plan.units];
                    if column < width {
                        let place = comptime![program.output_place(o)];
                        let sum = sums[comptime![program.sum_place(o) * plan.vectors + v]];
                        wide_out.index_mut(place).values[(first + column) as usize] = sum;
                    }
                }
            }
        }
    }
}
