//! What the positions of a chunk take from each other: scores, masked and decayed, times step sizes.
use super::{CubeShape, Form, PointwiseError, SsdShape, Vec8, ages_of, buffer, exp, sees};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// The share that stays from behind one position to behind a later one, from the sums of their logarithms.
#[cube]
pub(in crate::pointwise) fn share(later: f32, earlier: f32) -> f32 {
    exp(min(later - earlier, 0.0))
}

/// A unit for eight earlier positions of a position and head.
#[cube(launch_unchecked)]
pub fn decayed_scores<E: Float>(
    scores: &[f32],
    steps: &[f32],
    sums: &[f32],
    ages: &[f32],
    weights: &mut [Vec8<E>],
    seq: u32,
    samples: u32,
    chunks: u32,
    items: u32,
    #[comptime] form: Form,
) {
    let item = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if item < items {
        let chunk = comptime![form.chunk];
        let (row, m) = (item / comptime![chunk / 8], item % comptime![chunk / 8] * 8);
        let (of_head, l) = (row / chunk, row % chunk);
        let (block, head) = (of_head / comptime![form.heads], of_head % comptime![form.heads]);
        let (sample, t) = (block / chunks, block % chunks * chunk + l);
        let group = block * comptime![form.groups] + head / comptime![form.serves()];
        let mut result = Vec8::<E>::empty();
        let sum = sums[row as usize];
        #[unroll]
        for i in 0..8u32 {
            let mut weight = 0.0f32;
            let earlier = m + i;
            if earlier <= l {
                if sees(ages, t, sample, seq, samples, l - earlier, form) {
                    let at = (of_head * chunk + earlier) as usize;
                    let score = scores[((group * chunk + l) * chunk + earlier) as usize];
                    weight = score * share(sum, sums[at]) * steps[at];
                }
            }
            result.insert(comptime![i as usize], E::cast_from(weight));
        }
        weights[item as usize] = result;
    }
}

/// `weights [b, c, h, l, l]` of type `E` from `scores [b, c, g, l, l]`, fp32, step sizes and the sums of the logarithms
/// of shares. Later positions and other documents have zero.
///
/// # Errors
/// If there is no kernel for the shape, or a buffer is too short.
pub fn forward<E: Float>(
    client: &Client,
    scores: &Handle,
    [steps, sums]: [&Handle; 2],
    ages: Option<&Handle>,
    weights: &Handle,
    shape: SsdShape,
) -> Result<(), PointwiseError> {
    shape.check()?;
    let (cube, items) = (CubeShape::of(client), shape.weights() / 8);
    // SAFETY: every unit stays in its vector, and the buffers hold all of them.
    unsafe {
        launch_kernel!(decayed_scores<E>, client, cube.line(items), cube.dim();
            buffer("scores", scores, shape.weights() / shape.heads * shape.groups, 4)?,
            buffer("steps", steps, shape.per_head(), 4)?, buffer("sums", sums, shape.per_head(), 4)?,
            ages_of(ages, steps, shape)?, buffer("weights", weights, items, 8 * size_of::<E>())?;
            shape.seq as u32, shape.samples as u32, shape.chunks() as u32, items as u32; shape.form(ages.is_some()))
    };
    Ok(())
}
