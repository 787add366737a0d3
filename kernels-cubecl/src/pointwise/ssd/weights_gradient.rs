//! The gradients of scores, step sizes and decays in the weights of the positions of a chunk.
use super::weights::share;
use super::{CubeShape, Form, PointwiseError, SsdShape, Vec4, ages_of, buffer, sees};
use crate::pointwise::plane_total;
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Vectors of a row for each unit of a plane.
fn vectors(form: Form, cube: CubeShape) -> u32 {
    (form.chunk / 4).div_ceil(cube.plane)
}

/// A plane takes a position, and a cube's planes neighbouring ones, for all heads of a group, one after the other.
#[cube(launch_unchecked)]
pub fn decayed_scores_gradients<E: Float>(
    weights_gradient: &[Vec4<E>],
    scores: &[f32],
    steps: &[f32],
    sums: &[f32],
    ages: &[f32],
    scores_gradient: &mut [Vec4<E>],
    later: &mut [f32],
    earlier: &mut [f32],
    seq: u32,
    samples: u32,
    chunks: u32,
    numbers: u32,
    #[comptime] form: Form,
    #[comptime] cube: CubeShape,
) {
    let (chunk, vectors) = comptime![(form.chunk, vectors(form, cube))];
    let (plane, lane) = (UNIT_POS / comptime![cube.plane], UNIT_POS % comptime![cube.plane]);
    let planes = comptime![cube.planes() as u32];
    let mut columns = Shared::<[f32]>::new_slice(comptime![cube.planes() * form.chunk as usize]);
    let (block, l) = (CUBE_POS_X / comptime![form.groups], CUBE_POS_Y * planes + plane);
    let (sample, t) = (block / chunks, block % chunks * chunk + l);
    // What belongs to later positions or another document has a score of zero.
    let mut own = Array::<f32>::new(comptime![4 * vectors as usize]);
    let mut totals = Array::<f32>::new(comptime![4 * vectors as usize]);
    #[unroll]
    for i in 0..comptime![4 * vectors] {
        let m = (comptime![i / 4 * cube.plane] + lane) * 4 + comptime![i % 4];
        let slot = comptime![i as usize];
        totals[slot] = 0.0f32;
        own[slot] = 0.0f32;
        if l < chunk {
            if m <= l {
                if sees(ages, t, sample, seq, samples, l - m, form) {
                    own[slot] = scores[((CUBE_POS_X * chunk + l) * chunk + m) as usize];
                }
            }
        }
    }
    for of_group in 0..comptime![form.serves()] {
        let head =
            block * comptime![form.heads] + CUBE_POS_X % comptime![form.groups] * comptime![form.serves()] + of_group;
        let mut row = 0.0f32;
        #[unroll]
        for v in 0..vectors {
            let vector = comptime![v * cube.plane] + lane;
            if vector < comptime![chunk / 4] {
                let mut gradient = Vec4::<E>::new(E::from_int(0));
                let mut sum = 0.0f32;
                if l < chunk {
                    gradient = weights_gradient[((head * chunk + l) * comptime![chunk / 4] + vector) as usize];
                    sum = sums[(head * chunk + l) as usize];
                }
                #[unroll]
                for i in 0..4u32 {
                    let m = vector * 4 + i;
                    let slot = comptime![(v * 4 + i) as usize];
                    let mut along = 0.0f32;
                    if m <= l {
                        let at = (head * chunk + m) as usize;
                        let stays = f32::cast_from(gradient.extract(comptime![i as usize])) * share(sum, sums[at]);
                        let seen = sees(ages, t, sample, seq, samples, l - m, form);
                        totals[slot] = totals[slot] + select(seen, stays * steps[at], 0.0f32);
                        along = stays * own[slot];
                        row += along * steps[at];
                    }
                    columns[(plane * chunk + m) as usize] = along;
                }
            }
        }
        let row = plane_total(row, cube);
        if lane == 0 {
            if l < chunk {
                later[(head * chunk + l) as usize] = row;
            }
        }
        sync_cube();
        let mut m = UNIT_POS;
        while m < chunk {
            let mut column = 0.0f32;
            #[unroll]
            for other in 0..planes {
                column += columns[(comptime![other * chunk] + m) as usize];
            }
            earlier[(CUBE_POS_Y * numbers + head * chunk + m) as usize] = column;
            m += comptime![cube.units];
        }
        sync_cube();
    }
    #[unroll]
    for v in 0..vectors {
        let vector = comptime![v * cube.plane] + lane;
        if vector < comptime![chunk / 4] {
            if l < chunk {
                let mut result = Vec4::<E>::empty();
                #[unroll]
                for i in 0..4usize {
                    result.insert(i, E::cast_from(totals[comptime![v as usize * 4 + i]]));
                }
                scores_gradient[((CUBE_POS_X * chunk + l) * comptime![chunk / 4] + vector) as usize] = result;
            }
        }
    }
}

/// From the gradient of the weights `[b, c, h, l, l]`: that of the scores, `[b, c, g, l, l]` of type `E`, and in fp32 the
/// sums of gradient times weight over the positions that a position sees (`later`), and over those that see it, without
/// its step size, in parts (`earlier`, [`SsdShape::parts`] times `[b, c, h, l]`).
///
/// # Errors
/// If there is no kernel for the shape, or a buffer is too short.
pub fn backward<E: Float>(
    client: &Client,
    [weights_gradient, scores]: [&Handle; 2],
    [steps, sums]: [&Handle; 2],
    ages: Option<&Handle>,
    [scores_gradient, later, earlier]: [&Handle; 3],
    shape: SsdShape,
) -> Result<(), PointwiseError> {
    shape.check()?;
    let (cube, of_groups) = (CubeShape::of(client), shape.weights() / shape.heads * shape.groups);
    let (blocks, numbers) = (shape.parts(client)[0], shape.per_head());
    // SAFETY: every unit stays in its position and vectors, and the buffers hold all of them.
    unsafe {
        launch_kernel!(decayed_scores_gradients<E>, client,
            CubeCount::Static((shape.samples * shape.chunks() * shape.groups) as u32, blocks as u32, 1), cube.dim();
            buffer("weights_gradient", weights_gradient, shape.weights() / 4, 4 * size_of::<E>())?,
            buffer("scores", scores, of_groups, 4)?, buffer("steps", steps, numbers, 4)?,
            buffer("sums", sums, numbers, 4)?, ages_of(ages, steps, shape)?,
            buffer("scores_gradient", scores_gradient, of_groups / 4, 4 * size_of::<E>())?,
            buffer("later", later, numbers, 4)?, buffer("earlier", earlier, blocks * numbers, 4)?;
            shape.seq as u32, shape.samples as u32, shape.chunks() as u32, numbers as u32;
            shape.form(ages.is_some()), cube)
    };
    Ok(())
}
