//! The triangular systems of chunks, inverted by forward substitution, and the decayed scores of queries.
use super::{PointwiseError, SsdShape, beta};
use crate::pointwise::ssd::weights::share;
use crate::pointwise::ssd::{Form, ages_of, sees};
use crate::pointwise::{CubeShape, buffer};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// A cube takes a head's chunk: fills the system's lower triangle, inverts it column by column, a unit each, with the
/// columns of the inverse in the rows above the diagonal, and scales the inverse's columns.
#[cube(launch_unchecked)]
pub fn chunk_systems<E: Float>(
    key_scores: &[f32],
    query_scores: &[f32],
    raw: &[E],
    sums: &[f32],
    since: &[f32],
    ages: &[f32],
    inverse: &mut [E],
    of_values: &mut [E],
    of_keys: &mut [E],
    weights: &mut [E],
    seq: u32,
    samples: u32,
    chunks: u32,
    #[comptime] form: Form,
    #[comptime] cube: CubeShape,
) {
    let (chunk, line) = comptime![(form.chunk, form.chunk + 1)];
    let mut system = Shared::<[f32]>::new_slice(comptime![(chunk * line) as usize]);
    let (block, head) = (CUBE_POS_X / comptime![form.heads], CUBE_POS_X % comptime![form.heads]);
    let group = block * comptime![form.groups] + head / comptime![form.serves()];
    let (sample, first) = (block / chunks, block % chunks * chunk);
    let mut item = UNIT_POS;
    while item < comptime![chunk * chunk] {
        let (i, j) = (item / chunk, item % chunk);
        let mut below = 0.0f32;
        let mut weight = 0.0f32;
        if j <= i {
            if sees(ages, first + i, sample, seq, samples, i - j, form) {
                let from = (group * comptime![chunk * chunk] + item) as usize;
                let stays = share(sums[(CUBE_POS_X * chunk + i) as usize], sums[(CUBE_POS_X * chunk + j) as usize]);
                weight = query_scores[from] * stays;
                below = beta::<E>(raw, first + i, sample, head, seq, samples, form) * key_scores[from] * stays;
            }
        }
        weights[(CUBE_POS_X * comptime![chunk * chunk] + item) as usize] = E::cast_from(weight);
        if j < i {
            system[(i * line + j) as usize] = below;
        }
        item += comptime![cube.units];
    }
    sync_cube();
    let mut j = UNIT_POS;
    while j < chunk {
        for i in 1..chunk {
            if i > j {
                let mut sum = system[(i * line + j) as usize];
                for m in 1..i {
                    sum += system[(i * line + m) as usize] * select(m > j, system[(j * line + m) as usize], 0.0f32);
                }
                system[(j * line + i) as usize] = -sum;
            }
        }
        j += comptime![cube.units];
    }
    sync_cube();
    let mut item = UNIT_POS;
    while item < comptime![chunk * chunk] {
        let (i, j) = (item / chunk, item % chunk);
        let mut value = 0.0f32;
        if j < i {
            value = system[(j * line + i) as usize];
        }
        if j == i {
            value = 1.0f32;
        }
        let at = (CUBE_POS_X * comptime![chunk * chunk] + item) as usize;
        let scaled = value * beta::<E>(raw, first + j, sample, head, seq, samples, form);
        inverse[at] = E::cast_from(value);
        of_values[at] = E::cast_from(scaled);
        of_keys[at] = E::cast_from(-scaled * since[(CUBE_POS_X * chunk + j) as usize]);
        item += comptime![cube.units];
    }
}

/// From the scores of keys with keys and of queries with keys, fp32 `[b, c, g, l, l]`, β before its sigmoid, `raw [s, b, h]`
/// of type `E`, and the sums of logarithms of shares with `since`: `[b, c, h, l, l]` of type `E`, the inverse `T`, `T
/// diag(β)`, `−T diag(β since)`, and the decayed scores of queries.
///
/// # Errors
/// If there is no kernel for the shape, or a buffer is too short.
pub fn forward<E: Float>(
    client: &Client,
    [key_scores, query_scores]: [&Handle; 2],
    raw: &Handle,
    [sums, since]: [&Handle; 2],
    ages: Option<&Handle>,
    [inverse, of_values, of_keys, weights]: [&Handle; 4],
    shape: SsdShape,
) -> Result<(), PointwiseError> {
    shape.check_delta()?;
    let (of_groups, size) = (shape.weights() / shape.heads * shape.groups, size_of::<E>());
    let cube = CubeShape::of(client).fitting(shape.chunk);
    // SAFETY: every cube stays in its head's chunk, and the buffers hold all of them.
    unsafe {
        launch_kernel!(chunk_systems<E>, client,
            CubeCount::Static((shape.samples * shape.chunks() * shape.heads) as u32, 1, 1), cube.dim();
            buffer("key_scores", key_scores, of_groups, 4)?, buffer("query_scores", query_scores, of_groups, 4)?,
            buffer("raw", raw, shape.seq * shape.samples * shape.heads, size)?,
            buffer("sums", sums, shape.per_head(), 4)?, buffer("since", since, shape.per_head(), 4)?,
            ages_of(ages, sums, shape)?, buffer("inverse", inverse, shape.weights(), size)?,
            buffer("of_values", of_values, shape.weights(), size)?, buffer("of_keys", of_keys, shape.weights(), size)?,
            buffer("weights", weights, shape.weights(), size)?;
            shape.seq as u32, shape.samples as u32, shape.chunks() as u32; shape.form(ages.is_some()), cube)
    };
    Ok(())
}
