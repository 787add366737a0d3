//! How a program is split among cubes, and its launch.
use super::kernel::{BufferLaunch, fused};
use super::program::{self, Draw, Element, Extent, Program, row_fits};
use crate::pointwise::{CubeShape, PointwiseError, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Units of a cube, as far as a row does not need more.
const UNITS: usize = 256;
/// Most numbers, for 32-bit positions.
pub const MOST: usize = i32::MAX as usize;

/// How rows are distributed over units and cubes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Plan {
    /// Numbers of a vector.
    pub vector: usize,
    /// Units of a row: whole planes.
    pub units: u32,
    /// Units of a plane.
    pub plane: u32,
    /// Vectors of a row that a unit has.
    pub vectors: usize,
    /// Rows that a cube takes at once.
    pub side: u32,
    /// Vectors of a row.
    width: usize,
}

impl Plan {
    /// The plan for `rows × columns` numbers, unless a row is too long to be held in registers.
    pub fn of(client: &Client, program: &Program, rows: usize, columns: usize) -> Option<Self> {
        Self::on(CubeShape::of(client), program, rows, columns)
    }

    fn on(cube: CubeShape, program: &Program, rows: usize, columns: usize) -> Option<Self> {
        if rows * columns == 0 || rows * columns > MOST {
            return None;
        }
        let plane = cube.plane as usize;
        if !program.has_rows() {
            // Rows mean nothing: every unit has one vector.
            let units = if plane == 1 { cube.units as usize } else { UNITS };
            let vector = program::vector(rows * columns);
            let (units, plane) = (units as u32, cube.plane);
            return Some(Self { vector, units, plane, vectors: 1, side: 1, width: units as usize });
        }
        let vector = program::vector(columns);
        let width = columns / vector;
        let (units, side) = if plane == 1 {
            (cube.units as usize, 1)
        } else {
            // One vector a unit for short rows; for longer ones as few as fill the row.
            let vectors = width.div_ceil(program::MOST[0]).max(if width > UNITS { 2 } else { 1 });
            let units = width.div_ceil(vectors).next_multiple_of(plane);
            (units, (UNITS / units).max(1))
        };
        let vectors = width.div_ceil(units);
        let plan = Self { vector, units: units as u32, plane: cube.plane, vectors, side: side as u32, width };
        (row_fits(columns) || plane == 1).then_some(plan)
    }

    /// Numbers of shared memory.
    pub(super) fn scratch(self, program: &Program) -> usize {
        let planes = (self.units / self.plane) as usize;
        (program.reductions() * planes * self.side as usize).max(1)
    }
}

/// Runs `program` on `rows × columns` numbers; `E` is its half type. Buffers have no gaps.
///
/// # Errors
/// If a buffer is too short.
#[allow(clippy::too_many_arguments)]
pub fn launch<E: Float>(
    client: &Client,
    program: Program,
    plan: Plan,
    inputs: &[&Handle],
    scalars: &[f32],
    draws: &[Draw],
    outputs: &[&Handle],
    rows: usize,
    columns: usize,
) -> Result<(), PointwiseError> {
    check("numbers", rows * columns, 1, MOST)?;
    let mut read = Lists::default();
    for (input, handle) in program.inputs.iter().zip(inputs) {
        read.push::<E>(handle, input.extent, input.element, plan, rows, columns)?;
    }
    let mut written = Lists::default();
    for (output, handle) in program.outputs.iter().zip(outputs) {
        written.push::<E>(handle, output.extent, output.element, plan, rows, columns)?;
    }
    let total = rows * columns / plan.vector;
    let cubes = total.div_ceil(plan.width).div_ceil(plan.side as usize);
    // SAFETY: units past a row's or the matrix's end access nothing, and the buffers hold all numbers.
    unsafe {
        fused::launch_unchecked::<E>(
            client,
            CubeCount::Static(cubes as u32, 1, 1),
            CubeDim::new_1d(plan.units * plan.side),
            plan.vector,
            read.wide.into_iter().map(BufferLaunch::new).collect(),
            read.half.into_iter().map(BufferLaunch::new).collect(),
            read.per_row.into_iter().map(BufferLaunch::new).collect(),
            scalars.iter().copied().collect(),
            draws.iter().flat_map(|draw| draw_words(*draw)).collect(),
            written.wide.into_iter().map(BufferLaunch::new).collect(),
            written.half.into_iter().map(BufferLaunch::new).collect(),
            written.per_row.into_iter().map(BufferLaunch::new).collect(),
            plan.width as u32,
            total as u32,
            program,
            plan,
        )
    };
    Ok(())
}

/// Stream, seed and threshold, as the kernel reads them: it compares the first word of an element with the threshold's
/// first 32 bits, and the first 21 bits of the second with the others.
fn draw_words(draw: Draw) -> [u32; 6] {
    let threshold = draw.threshold();
    let two = |x: u64| [x as u32, (x >> 32) as u32];
    let ([stream_low, stream_high], [seed_low, seed_high]) = (two(draw.stream), two(draw.seed));
    // All are below a threshold of 2⁵³, whose first bits have no place in a word.
    let (most, least) = match threshold >> 53 {
        0 => ((threshold >> 21) as u32, (threshold & 0x1f_ffff) as u32),
        _ => (u32::MAX, 1 << 21),
    };
    [stream_low, stream_high, seed_low, seed_high, most, least]
}

/// Buffers by the kernel's arguments.
#[derive(Default)]
struct Lists {
    wide: Vec<BufferArg>,
    half: Vec<BufferArg>,
    per_row: Vec<BufferArg>,
}

impl Lists {
    fn push<E: Float>(
        &mut self,
        handle: &Handle,
        extent: Extent,
        element: Element,
        plan: Plan,
        rows: usize,
        columns: usize,
    ) -> Result<(), PointwiseError> {
        let (list, len, bytes) = match (extent, element) {
            (Extent::PerRow, _) => (&mut self.per_row, rows, 4),
            (Extent::Single, _) => (&mut self.per_row, 1, 4),
            (_, Element::F32) => (&mut self.wide, rows * columns / plan.vector, 4 * plan.vector),
            (_, Element::Half) => (&mut self.half, rows * columns / plan.vector, size_of::<E>() * plan.vector),
        };
        let len = if extent == Extent::PerColumn { columns / plan.vector } else { len };
        list.push(buffer("a fused operand", handle, len, bytes)?);
        Ok(())
    }
}
