//! Dot products over a head's features.
use super::{PointwiseError, SsdShape};
use crate::pointwise::ssd::Form;
use crate::pointwise::ssd::combine::{head_total, lanes};
use crate::pointwise::{CubeShape, Vec8, buffer};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// A position of a head for each `lanes` units.
#[cube(launch_unchecked)]
pub fn products_of_heads<E: Float>(
    by_head: &[Vec8<E>],
    by_column: &[Vec8<E>],
    dots: &mut [f32],
    numbers: u32,
    #[comptime] form: Form,
    #[comptime] lanes: u32,
    #[comptime] cube: CubeShape,
) {
    let (vectors, chunk, serves) = comptime![(form.head_dim / 8, form.chunk, form.serves())];
    let item = CUBE_POS_X * comptime![cube.units / lanes] + UNIT_POS / lanes;
    // Past the last one it is read again: the units of a plane add up together.
    let at = min(item, numbers - 1);
    let (head, l) = (at / chunk, at % chunk);
    let column = ((head / serves * chunk + l) * serves + head % serves) * vectors;
    let mut dot = 0.0f32;
    #[unroll]
    for v in 0..comptime![vectors / lanes] {
        let own = UNIT_POS % lanes + comptime![v * lanes];
        let (a, b) = (by_head[(at * vectors + own) as usize], by_column[(column + own) as usize]);
        #[unroll]
        for i in 0..8usize {
            dot += f32::cast_from(a.extract(i)) * f32::cast_from(b.extract(i));
        }
    }
    let dot = head_total(dot, lanes);
    if UNIT_POS % lanes == 0 && item < numbers {
        dots[at as usize] = dot;
    }
}

/// `dots [b, c, h, l]`, fp32, of a tensor by head and one by column.
///
/// # Errors
/// If there is no kernel for the shape, or a buffer is too short.
pub fn dots<E: Float>(
    client: &Client,
    [by_head, by_column]: [&Handle; 2],
    dots: &Handle,
    shape: SsdShape,
) -> Result<(), PointwiseError> {
    shape.check_delta()?;
    let (cube, form, vector) = (CubeShape::of(client), shape.form(false), 8 * size_of::<E>());
    let (lanes, numbers) = (lanes(form.head_dim / 8, cube), shape.per_head());
    let held = numbers * shape.head_dim / 8;
    // SAFETY: every unit stays in its head's position, and the buffers hold all of them.
    unsafe {
        launch_kernel!(products_of_heads<E>, client,
            CubeCount::Static(numbers.div_ceil((cube.units / lanes) as usize) as u32, 1, 1), cube.dim();
            buffer("by_head", by_head, held, vector)?, buffer("by_column", by_column, held, vector)?,
            buffer("dots", dots, numbers, 4)?; numbers as u32; form, lanes, cube)
    };
    Ok(())
}
