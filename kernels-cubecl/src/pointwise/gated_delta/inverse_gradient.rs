//! From the gradients of a system's inverse with scaled columns to that of the inverse.
use super::{PointwiseError, SsdShape, beta};
use crate::pointwise::ssd::Form;
use crate::pointwise::{CubeShape, buffer};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// A unit takes a column of a head's chunk.
#[cube(launch_unchecked)]
pub fn inverse_gradients<E: Float>(
    inverse: &[E],
    of_values: &[E],
    of_keys: &[E],
    raw: &[E],
    since: &[f32],
    gradient: &mut [E],
    of_beta: &mut [f32],
    slopes: &mut [f32],
    seq: u32,
    samples: u32,
    chunks: u32,
    numbers: u32,
    #[comptime] form: Form,
) {
    let number = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if number < numbers {
        let chunk = comptime![form.chunk];
        let (of_head, j) = (number / chunk, number % chunk);
        let (block, head) = (of_head / comptime![form.heads], of_head % comptime![form.heads]);
        let t = block % chunks * chunk + j;
        let beta = beta::<E>(raw, t, block / chunks, head, seq, samples, form);
        let stays = since[number as usize];
        let mut value_sum = 0.0f32;
        let mut key_sum = 0.0f32;
        for i in 0..chunk {
            let at = ((of_head * chunk + i) * chunk + j) as usize;
            let (values, keys) = (f32::cast_from(of_values[at]), f32::cast_from(of_keys[at]) * -stays);
            let column = f32::cast_from(inverse[at]);
            value_sum += column * values;
            key_sum += column * keys;
            gradient[at] = E::cast_from(beta * (values + keys));
        }
        of_beta[number as usize] = value_sum + key_sum;
        slopes[number as usize] = beta * key_sum;
    }
}

/// From the gradients of `T diag(β)` and of `−T diag(β since)`, `[b, c, h, l, l]`: that of `T` as such, all of type `E`, and
/// fp32 `[b, c, h, l]` those of β and of the logarithm of `since`.
///
/// # Errors
/// If there is no kernel for the shape, or a buffer is too short.
pub fn backward<E: Float>(
    client: &Client,
    inverse: &Handle,
    [of_values, of_keys]: [&Handle; 2],
    [raw, since]: [&Handle; 2],
    [gradient, of_beta, slopes]: [&Handle; 3],
    shape: SsdShape,
) -> Result<(), PointwiseError> {
    shape.check_delta()?;
    let (cube, numbers, size) = (CubeShape::of(client), shape.per_head(), size_of::<E>());
    let square = |name, of| buffer(name, of, shape.weights(), size);
    // SAFETY: every unit stays in its column, and the buffers hold all of them.
    unsafe {
        launch_kernel!(inverse_gradients<E>, client, cube.line(numbers), cube.dim();
            square("inverse", inverse)?, square("of_values", of_values)?, square("of_keys", of_keys)?,
            buffer("raw", raw, shape.seq * shape.samples * shape.heads, size)?, buffer("since", since, numbers, 4)?,
            square("gradient", gradient)?, buffer("of_beta", of_beta, numbers, 4)?,
            buffer("of_sums", slopes, numbers, 4)?;
            shape.seq as u32, shape.samples as u32, shape.chunks() as u32, numbers as u32; shape.form(false))
    };
    Ok(())
}
