//! The launch of a program.
use super::draw::{Draw, draw_words};
use super::kernel::fused;
use super::plan::{MOST, Plan};
use super::program::{Element, Extent, Program, Sharing};
use super::row::{BufferLaunch, BuffersLaunch, NumbersLaunch};
use crate::pointwise::partial_sums::sum_partials;
use crate::pointwise::{PointwiseError, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Runs `program` on `rows × columns` numbers; `E` is its half type. Buffers have no gaps. Where rows are summed, these
/// [can be](super::rows_can_be_summed).
///
/// # Errors
/// If a buffer is too short.
pub fn launch<E: Float>(
    client: &Client,
    program: Program,
    plan: Plan,
    inputs: &[&Handle],
    shares: &[Sharing],
    scalars: &[f32],
    draws: &[Draw],
    outputs: &[&Handle],
    (rows, columns): (usize, usize),
) -> Result<(), PointwiseError> {
    check("numbers", rows * columns, 1, MOST)?;
    let mut read = Lists::default();
    for (number, (input, handle)) in program.inputs.iter().zip(inputs).enumerate() {
        let rows = if input.extent.is_shared() { shares[program.share(number)].rows(rows) } else { rows };
        read.push::<E>(handle, input.extent, input.element, plan, rows, columns)?;
    }
    let total = rows * columns / plan.vector;
    let cubes = plan.cubes(&program, total);
    // Every line of units has sums of its own.
    let lines = (cubes * plan.side) as usize;
    let (mut written, mut sums) = (Lists::default(), Vec::new());
    for (output, handle) in program.outputs.iter().zip(outputs) {
        if output.extent == Extent::PerColumn {
            let partial = client.empty(4 * lines * columns);
            written.push::<E>(&partial, Extent::Whole, Element::F32, plan, lines, columns)?;
            sums.push((partial, *handle));
        } else {
            written.push::<E>(handle, output.extent, output.element, plan, rows, columns)?;
        }
    }
    let shares = shares.iter().flat_map(|share| [&share.sizes[..], &share.strides].concat());
    let draws = draws.iter().flat_map(|draw| draw_words(*draw));
    let numbers = NumbersLaunch::new(scalars.iter().copied().collect(), draws.collect(), shares.collect());
    // SAFETY: units past a row's or the matrix's end access nothing, and the buffers hold all numbers.
    unsafe {
        launch_kernel!(fused<E>, client, CubeCount::Static(cubes, 1, 1), CubeDim::new_1d(plan.units * plan.side),
            plan.vector;
            read.argument(), numbers, written.argument(); plan.width as u32, total as u32; program, plan)
    };
    sums.into_iter().try_for_each(|(partial, sum)| sum_partials(client, &partial, sum, lines, columns))
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
            (Extent::PerRow | Extent::SharedPerRow, _) => (&mut self.per_row, rows, 4),
            (Extent::Single, _) => (&mut self.per_row, 1, 4),
            (_, Element::F32) => (&mut self.wide, rows * columns / plan.vector, 4 * plan.vector),
            (_, Element::Half) => (&mut self.half, rows * columns / plan.vector, size_of::<E>() * plan.vector),
        };
        let len = if extent == Extent::PerColumn { columns / plan.vector } else { len };
        list.push(buffer("a fused operand", handle, len, bytes)?);
        Ok(())
    }

    fn argument<E: Float, N: Size>(self) -> BuffersLaunch<E, N> {
        BuffersLaunch::new(
            self.wide.into_iter().map(BufferLaunch::new).collect(),
            self.half.into_iter().map(BufferLaunch::new).collect(),
            self.per_row.into_iter().map(BufferLaunch::new).collect(),
        )
    }
}
