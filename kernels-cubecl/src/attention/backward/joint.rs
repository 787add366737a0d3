//! All gradients by one kernel.
use super::{Gradients, Saved, Sums, check_saved};
use crate::attention::joint_gradient::{self, JointGradientPlan};
use crate::attention::joint_sum;
use crate::attention::{AttentionError, AttentionShape, Extras, Tensor4, UNITS, grid, maps, sizes, starts};
use crate::hopper::mma::{Half, ROWS};
use crate::tiling::KEY_ROWS;
use cubecl::prelude::*;
use half::{bf16, f16};

/// Second and last step of [`backward`](super::backward) where one kernel computes all gradients.
#[allow(clippy::too_many_arguments)]
pub fn joint_gradients(
    client: &Client,
    shape: &AttentionShape,
    scale: f32,
    extras: &Extras,
    saved: Saved,
    out_gradient: &Tensor4,
    sums: &Sums,
    gradients: Gradients,
    plan: JointGradientPlan,
) -> Result<(), AttentionError> {
    check_saved(client, shape, extras, &saved, out_gradient)?;
    gradients.q.check("q_gradient", shape.query_shape())?;
    gradients.k.check("k_gradient", shape.key_shape())?;
    gradients.v.check("v_gradient", shape.value_shape())?;
    let longest_key = extras.packed.map(|packed| packed.longest_key);
    let longest_query = extras.packed.map(|packed| packed.longest_query);
    let (sequences, key_blocks) = grid(shape, extras, longest_key, shape.keys, KEY_ROWS);
    let (_, query_blocks) = grid(shape, extras, longest_query, shape.queries, joint_gradient::BLOCK);
    let parts = joint_sum::len(shape, extras);
    let q_sum = client.empty(4 * parts);
    // SAFETY: the buffer has just been made with this size.
    let q_sums = || unsafe { BufferArg::from_raw_parts(q_sum.clone(), parts / 4) };
    let gather = match extras.element {
        Half::Bf16 => joint_sum::gather::launch_unchecked::<bf16>,
        Half::F16 => joint_sum::gather::launch_unchecked::<f16>,
    };
    let packed = plan.variant.packed;
    let (query_starts, key_starts) = starts(extras, &sums.sums);
    let (gathered_starts, _) = starts(extras, &sums.sums);
    let [by_row, by_batch, by_head] = gradients.q.strides.map(|stride| (stride / 8) as u32);
    // SAFETY: the tensor maps bound every access but those to the parts, which have a place for every block of every
    // sequence and for one more; `gather` writes rows that exist.
    unsafe {
        joint_sum::clear::launch_unchecked(
            client,
            CubeCount::Static((parts / 4).div_ceil(8 * UNITS as usize).min(1 << 16) as u32, 1, 1),
            CubeDim::new_1d(UNITS),
            q_sums(),
        );
        joint_gradient::joint_gradient::launch_unchecked(
            client,
            CubeCount::Static(shape.kv_heads as u32, sequences, key_blocks),
            CubeDim::new_1d(UNITS),
            maps::load(saved.q, joint_gradient::BLOCK),
            maps::load(saved.k, ROWS),
            maps::load(saved.v, ROWS),
            maps::load(out_gradient, joint_gradient::BLOCK),
            maps::statistics(shape, &sums.sums, plan.line(), f32::elem_type_native()),
            query_starts,
            key_starts,
            q_sums(),
            maps::store(gradients.k, packed),
            maps::store(gradients.v, packed),
            sizes(shape, extras),
            scale,
            plan,
        );
        gather(
            client,
            CubeCount::Static(query_blocks, shape.heads as u32, sequences),
            CubeDim::new_1d(UNITS),
            q_sums(),
            BufferArg::from_raw_parts(gradients.q.handle.clone(), gradients.q.extent() / 8),
            gathered_starts,
            shape.queries as u32,
            joint_sum::blocks_of_head(shape, extras) as u32,
            by_row,
            by_batch,
            by_head,
            scale,
            packed,
        );
    }
    Ok(())
}
