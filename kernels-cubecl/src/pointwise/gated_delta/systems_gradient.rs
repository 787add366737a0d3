//! The gradients of scores, β and decays in the systems of chunks and in the decayed scores of queries.
use super::{PointwiseError, SsdShape, beta};
use crate::pointwise::ssd::weights::share;
use crate::pointwise::ssd::{Form, ages_of, sees};
use crate::pointwise::{CubeShape, buffer};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Shared memory of a cube.
pub(super) fn shared_bytes(form: Form) -> usize {
    4 * 4 * (form.chunk * (form.chunk + 1)) as usize
}

/// A cube takes a group's chunk, and its heads one after the other.
#[cube(launch_unchecked)]
pub fn chunk_systems_gradients<E: Float>(
    systems: &[f32],
    weights: &[E],
    key_scores: &[f32],
    query_scores: &[f32],
    raw: &[E],
    sums: &[f32],
    ages: &[f32],
    of_key_scores: &mut [E],
    of_query_scores: &mut [E],
    of_beta: &mut [f32],
    slopes: &mut [f32],
    seq: u32,
    samples: u32,
    chunks: u32,
    #[comptime] form: Form,
    #[comptime] cube: CubeShape,
) {
    let (chunk, line, square) = comptime![(form.chunk, form.chunk + 1, form.chunk * form.chunk)];
    let mut of_keys = Shared::<[f32]>::new_slice(comptime![(chunk * line) as usize]);
    let mut of_queries = Shared::<[f32]>::new_slice(comptime![(chunk * line) as usize]);
    // Of one head: gradient times β's factor, and times all that decays.
    let mut scaled = Shared::<[f32]>::new_slice(comptime![(chunk * line) as usize]);
    let mut decayed = Shared::<[f32]>::new_slice(comptime![(chunk * line) as usize]);
    let block = CUBE_POS_X / comptime![form.groups];
    let (sample, first) = (block / chunks, block % chunks * chunk);
    for of_group in 0..comptime![form.serves()] {
        let head = CUBE_POS_X % comptime![form.groups] * comptime![form.serves()] + of_group;
        let of_head = block * comptime![form.heads] + head;
        let mut item = UNIT_POS;
        while item < square {
            let (i, j) = (item / chunk, item % chunk);
            let at = (i * line + j) as usize;
            let mut stays = 0.0f32;
            if j <= i {
                if sees(ages, first + i, sample, seq, samples, i - j, form) {
                    stays = share(sums[(of_head * chunk + i) as usize], sums[(of_head * chunk + j) as usize]);
                }
            }
            let from = (CUBE_POS_X * square + item) as usize;
            let of_weight = f32::cast_from(weights[(of_head * square + item) as usize]) * stays;
            // The gradient of the system is −Tᵀ (gradient of T) Tᵀ below its diagonal.
            let mut of_system = 0.0f32;
            if j < i {
                of_system = -systems[(of_head * square + item) as usize] * stays;
            }
            let beta = beta::<E>(raw, first + i, sample, head, seq, samples, form);
            let along = of_system * key_scores[from];
            scaled[at] = along;
            decayed[at] = along * beta + of_weight * query_scores[from];
            let mut key_sum = of_system * beta;
            let mut query_sum = of_weight;
            if of_group > 0 {
                key_sum += of_keys[at];
                query_sum += of_queries[at];
            }
            of_keys[at] = key_sum;
            of_queries[at] = query_sum;
            item += comptime![cube.units];
        }
        sync_cube();
        let mut item = UNIT_POS;
        while item < comptime![2 * chunk] {
            let l = item % chunk;
            let number = (of_head * chunk + l) as usize;
            let mut sum = 0.0f32;
            if item < chunk {
                // What a position sees has decayed by its sum of logarithms, what sees it by less.
                for m in 0..chunk {
                    sum += decayed[(l * line + m) as usize] - decayed[(m * line + l) as usize];
                }
                slopes[number] = slopes[number] + sum;
            } else {
                for m in 0..chunk {
                    sum += scaled[(l * line + m) as usize];
                }
                of_beta[number] = of_beta[number] + sum;
            }
            item += comptime![cube.units];
        }
        sync_cube();
    }
    let mut item = UNIT_POS;
    while item < square {
        let (i, j) = (item / chunk, item % chunk);
        let at = (CUBE_POS_X * square + item) as usize;
        of_query_scores[at] = E::cast_from(of_queries[(i * line + j) as usize]);
        // Scores of keys with keys are symmetric: so is this, and one GEMM gives the gradient of both factors.
        of_key_scores[at] = E::cast_from(of_keys[(max(i, j) * line + min(i, j)) as usize]);
        item += comptime![cube.units];
    }
}

/// From `Tᵀ (gradient of T) Tᵀ`, fp32 `[b, c, h, l, l]`, and the gradient of the decayed scores of queries, of type `E`: those
/// of the scores of keys, below the diagonal and above it, and of queries, `[b, c, g, l, l]` of type `E`; and adds those of β
/// and of the sums of logarithms, fp32 `[b, c, h, l]`.
///
/// # Errors
/// If there is no kernel for the shape, or a buffer is too short.
pub fn backward<E: Float>(
    client: &Client,
    [systems, weights]: [&Handle; 2],
    [key_scores, query_scores]: [&Handle; 2],
    [raw, sums]: [&Handle; 2],
    ages: Option<&Handle>,
    [of_key_scores, of_query_scores, of_beta, slopes]: [&Handle; 4],
    shape: SsdShape,
) -> Result<(), PointwiseError> {
    shape.check_delta()?;
    let (cube, size) = (CubeShape::of(client), size_of::<E>());
    let (of_groups, numbers) = (shape.weights() / shape.heads * shape.groups, shape.per_head());
    // SAFETY: every cube stays in its group's chunk, and the buffers hold all of them.
    unsafe {
        launch_kernel!(chunk_systems_gradients<E>, client,
            CubeCount::Static((shape.samples * shape.chunks() * shape.groups) as u32, 1, 1), cube.dim();
            buffer("systems", systems, shape.weights(), 4)?, buffer("weights", weights, shape.weights(), size)?,
            buffer("key_scores", key_scores, of_groups, 4)?, buffer("query_scores", query_scores, of_groups, 4)?,
            buffer("raw", raw, shape.seq * shape.samples * shape.heads, size)?, buffer("sums", sums, numbers, 4)?,
            ages_of(ages, sums, shape)?, buffer("of_key_scores", of_key_scores, of_groups, size)?,
            buffer("of_query_scores", of_query_scores, of_groups, size)?, buffer("of_beta", of_beta, numbers, 4)?,
            buffer("of_sums", slopes, numbers, 4)?; shape.seq as u32, shape.samples as u32, shape.chunks() as u32;
            shape.form(ages.is_some()), cube)
    };
    Ok(())
}
