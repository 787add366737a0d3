//! What a kernel does for a row.
use super::draw::{DRAW_WORDS, draws_from};
use super::math::{binary, unary};
use super::plan::Plan;
use super::program::{Element, Extent, Program, Reduce, Step};
use crate::pointwise::CubeShape;
use cubecl::prelude::*;

/// One buffer of a launch.
#[derive(CubeType, CubeLaunch)]
pub struct Buffer<T: CubePrimitive> {
    pub(super) values: Box<[T]>,
}

/// What a launch reads or writes.
#[derive(CubeType, CubeLaunch)]
pub struct Buffers<E: Float, N: Size> {
    pub(super) wide: Sequence<Buffer<Vector<f32, N>>>,
    pub(super) half: Sequence<Buffer<Vector<E, N>>>,
    /// One number for each row.
    pub(super) per_row: Sequence<Buffer<f32>>,
}

/// Numbers that differ between launches of one kernel.
#[derive(CubeType, CubeLaunch)]
pub struct Numbers {
    scalars: Sequence<f32>,
    draws: Sequence<u32>,
    /// Sizes and strides of each [`Sharing`](super::program::Sharing).
    shares: Sequence<u32>,
}

/// A row, and a unit of it. `width` is the number of a row's vectors, `total` that of all rows.
#[derive(CubeType)]
pub(super) struct Place {
    pub row: u32,
    pub unit: u32,
    pub width: u32,
    pub total: u32,
}

/// Reads the inputs of a row into `loaded`.
#[cube]
pub(super) fn load_row<E: Float, N: Size>(
    read: &Buffers<E, N>,
    numbers: &Numbers,
    loaded: &mut Array<Vector<f32, N>>,
    place: &Place,
    #[comptime] program: Program,
    #[comptime] plan: Plan,
) {
    let (row, unit, width, total) = (place.row, place.unit, place.width, place.total);
    let first = row * width;
    #[unroll]
    for input in 0..comptime![program.inputs.len()] {
        let list = comptime![program.place(input)];
        let extent = comptime![program.inputs[input].extent];
        let element = comptime![program.inputs[input].element];
        let mut own = row;
        if comptime![extent.is_shared()] {
            own = shared_row(row, &numbers.shares, comptime![5 * program.share(input)]);
        }
        #[unroll]
        for v in 0..comptime![plan.vectors] {
            let column = unit + comptime![v as u32 * plan.units];
            let mut value = Vector::<f32, N>::new(0.0);
            if column < width && first + column < total {
                let at = if comptime![extent == Extent::PerColumn] { column } else { own * width + column };
                if comptime![matches!(extent, Extent::PerRow | Extent::SharedPerRow)] {
                    value = Vector::<f32, N>::new(read.per_row.index(list).values[own as usize]);
                } else if comptime![extent == Extent::Single] {
                    value = Vector::<f32, N>::new(read.per_row.index(list).values[0usize]);
                } else if comptime![element == Element::F32] {
                    value = read.wide.index(list).values[at as usize];
                } else {
                    value = Vector::<f32, N>::cast_from(read.half.index(list).values[at as usize]);
                }
            }
            loaded[comptime![input * plan.vectors + v]] = value;
        }
    }
}

/// The steps of a row, its outputs, and what it adds to `sums`.
#[cube]
pub(super) fn one_row<E: Float, N: Size>(
    loaded: &Array<Vector<f32, N>>,
    numbers: &Numbers,
    written: &mut Buffers<E, N>,
    sums: &mut Array<Vector<f32, N>>,
    scratch: &mut Shared<[f32]>,
    offset: u32,
    place: &Place,
    #[comptime] program: Program,
    #[comptime] plan: Plan,
) {
    let (row, unit, width, total) = (place.row, place.unit, place.width, place.total);
    let first = row * width;
    let mut registers = Sequence::<Vector<f32, N>>::new();
    let mut reductions = comptime![0usize];
    #[unroll]
    for s in 0..comptime![program.steps.len()] {
        let step = comptime![program.steps[s]];
        match step {
            Step::Load(input) =>
            {
                #[unroll]
                for v in 0..comptime![plan.vectors] {
                    registers.push(loaded[comptime![input * plan.vectors + v]]);
                }
            }
            Step::Scalar(scalar) => {
                let value = Vector::<f32, N>::new(numbers.scalars[scalar]);
                #[unroll]
                for _ in 0..comptime![plan.vectors] {
                    registers.push(value);
                }
            }
            Step::Bernoulli(draw) =>
            {
                #[unroll]
                for v in 0..comptime![plan.vectors] {
                    let column = unit + comptime![v as u32 * plan.units];
                    let start = (first + column) * comptime![plan.vector as u32];
                    let mut value = Vector::<f32, N>::new(0.0);
                    #[unroll]
                    for four in 0..comptime![plan.vector.div_ceil(4)] {
                        let index = u64::cast_from(start + comptime![4 * four as u32]);
                        let bits = draws_from(index, &numbers.draws, comptime![DRAW_WORDS * draw]);
                        #[unroll]
                        for i in 0..comptime![plan.vector.min(4)] {
                            let bit = (bits >> comptime![i as u32]) & 1u32;
                            value.insert(comptime![4 * four + i], f32::cast_from(bit));
                        }
                    }
                    registers.push(value);
                }
            }
            Step::Unary(f, x) =>
            {
                #[unroll]
                for v in 0..comptime![plan.vectors] {
                    let x = registers[comptime![x * plan.vectors + v]];
                    registers.push(unary(x, f, comptime![plan.vector]));
                }
            }
            Step::Binary(f, a, b) =>
            {
                #[unroll]
                for v in 0..comptime![plan.vectors] {
                    let a = registers[comptime![a * plan.vectors + v]];
                    let b = registers[comptime![b * plan.vectors + v]];
                    registers.push(binary(a, b, f, comptime![plan.vector]));
                }
            }
            Step::Reduce(f, x) => {
                let mut own = start(f);
                #[unroll]
                for v in 0..comptime![plan.vectors] {
                    let column = unit + comptime![v as u32 * plan.units];
                    if column < width {
                        let x = registers[comptime![x * plan.vectors + v]];
                        #[unroll]
                        for i in 0..comptime![plan.vector] {
                            own = both(own, x.extract(i), f);
                        }
                    }
                }
                let whole = Vector::<f32, N>::new(over_row(own, scratch, offset, reductions, f, plan));
                comptime![reductions += 1];
                #[unroll]
                for _ in 0..comptime![plan.vectors] {
                    registers.push(whole);
                }
            }
        }
    }
    #[unroll]
    for o in 0..comptime![program.outputs.len()] {
        let output = comptime![program.outputs[o]];
        let list = comptime![program.output_place(o)];
        #[unroll]
        for v in 0..comptime![plan.vectors] {
            let column = unit + comptime![v as u32 * plan.units];
            let value = registers[comptime![output.register * plan.vectors + v]];
            if column < width && first + column < total {
                if comptime![output.extent == Extent::PerColumn] {
                    let at = comptime![program.sum_place(o) * plan.vectors + v];
                    let sum = sums[at] + value;
                    sums[at] = sum;
                } else if comptime![output.extent == Extent::PerRow] {
                    if column == 0 {
                        written.per_row.index_mut(list).values[row as usize] = value.extract(0usize);
                    }
                } else if comptime![output.element == Element::F32] {
                    written.wide.index_mut(list).values[(first + column) as usize] = value;
                } else {
                    written.half.index_mut(list).values[(first + column) as usize] = Vector::<E, N>::cast_from(value);
                }
            }
        }
    }
}

/// As [`Sharing::row`](super::program::Sharing::row), of which `shares` has sizes and strides from `at` on.
#[cube]
fn shared_row(row: u32, shares: &Sequence<u32>, #[comptime] at: usize) -> u32 {
    let js = shares[at];
    let ks = shares[comptime![at + 1]];
    let outer = row / ks;
    outer / js * shares[comptime![at + 2]]
        + outer % js * shares[comptime![at + 3]]
        + row % ks * shares[comptime![at + 4]]
}

#[cube]
fn start(#[comptime] f: Reduce) -> f32 {
    match f {
        Reduce::Sum => 0.0f32.runtime(),
        Reduce::Max => f32::NEG_INFINITY.runtime(),
    }
}

#[cube]
fn both(a: f32, b: f32, #[comptime] f: Reduce) -> f32 {
    match f {
        Reduce::Sum => a + b,
        Reduce::Max => max(a, b),
    }
}

/// `own` of all units of the row. Each reduction has its own part of `scratch`, from `offset` on, so it needs one barrier.
#[cube]
fn over_row(
    own: f32,
    scratch: &mut Shared<[f32]>,
    offset: u32,
    #[comptime] reduction: usize,
    #[comptime] f: Reduce,
    #[comptime] plan: Plan,
) -> f32 {
    let cube = comptime![CubeShape { units: plan.units, plane: plan.plane }];
    let mut all = own;
    if comptime![plan.units < plan.plane] {
        // A butterfly: each time with the unit twice as far away.
        #[unroll]
        for i in 0..comptime![plan.units.trailing_zeros()] {
            all = both(all, plane_shuffle_xor(all, comptime![1u32 << i]), f);
        }
    } else if comptime![plan.plane > 1] {
        all = match f {
            Reduce::Sum => plane_sum(own),
            Reduce::Max => plane_max(own),
        };
    }
    let planes = comptime![cube.planes()];
    if comptime![planes > 1] {
        let line = (UNIT_POS / comptime![plan.units]) as usize;
        let at = (line + comptime![reduction * plan.side as usize]) * planes + offset as usize;
        if UNIT_POS % comptime![plan.plane] == 0 {
            scratch[at + (UNIT_POS % comptime![plan.units] / comptime![plan.plane]) as usize] = all;
        }
        sync_cube();
        all = scratch[at];
        #[unroll]
        for i in 1..planes {
            all = both(all, scratch[at + i], f);
        }
    }
    all
}
