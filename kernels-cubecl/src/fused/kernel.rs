//! The kernel of a program.
use super::plan::Plan;
use super::program::{Extent, Program};
use super::row::{Buffers, Numbers, Place, load_row, one_row};
use cubecl::prelude::*;

/// A cube takes `side` rows at once or one of the `parts` of a row, `units` units each, and a unit every `units`-th vector of
/// its row. `width` is the number of a row's vectors, `total` that of all rows. Where rows are summed, a cube takes others
/// after these, and every line of units writes the sum of its rows.
#[cube(launch_unchecked)]
pub fn fused<E: Float, N: Size>(
    read: &Buffers<E, N>,
    numbers: &Numbers,
    written: &mut Buffers<E, N>,
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
    let place = Place { row, unit, width, total };
    load_row(read, numbers, &mut loaded, &place, comptime![program.clone()], plan);
    if comptime![count == 0] {
        one_row(&loaded, numbers, written, &mut sums, &mut shared, 0u32, &place, program, plan);
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
            let place = Place { row: next, unit, width, total };
            load_row(read, numbers, &mut loaded, &place, comptime![program.clone()], plan);
            let place = Place { row, unit, width, total };
            one_row(&held, numbers, written, &mut sums, &mut shared, offset, &place, comptime![program.clone()], plan);
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
                        let list = comptime![program.output_place(o)];
                        let sum = sums[comptime![program.sum_place(o) * plan.vectors + v]];
                        written.wide.index_mut(list).values[(first + column) as usize] = sum;
                    }
                }
            }
        }
    }
}
