//! The gradients of the queries, and those of the keys and values, by kernels of their own.
use super::{Saved, Sums, check_saved};
use crate::attention::key_gradient::{self, KeyGradientPlan};
use crate::attention::query_gradient::{self, QueryGradientPlan};
use crate::attention::{AttentionError, AttentionShape, Extras, Tensor4, UNITS, flat, grid, maps, sizes, starts};
use crate::hopper::mma::ROWS;
use crate::tiling::{KEY_ROWS, QUERY_ROWS};
use cubecl::prelude::*;

/// Second step of [`backward`](super::backward): the gradient of the queries.
#[allow(clippy::too_many_arguments)]
pub fn query_gradients(
    client: &Client,
    shape: &AttentionShape,
    scale: f32,
    extras: &Extras,
    saved: Saved,
    out_gradient: &Tensor4,
    sums: &Sums,
    gradient: &Tensor4,
    plan: QueryGradientPlan,
) -> Result<(), AttentionError> {
    check_saved(client, shape, extras, &saved, out_gradient)?;
    gradient.check("q_gradient", shape.query_shape())?;
    let longest = extras.packed.map(|packed| packed.longest_query);
    let (sequences, blocks) = grid(shape, extras, longest, shape.queries, QUERY_ROWS);
    let len = 2 * shape.statistics_len();
    let (query_starts, key_starts) = starts(extras, &sums.sums);
    // SAFETY: the tensor maps bound every access but those to the statistics, whose rows are padded to whole blocks and
    // which the kernel bounds itself when sequences are packed.
    unsafe {
        query_gradient::query_gradient::launch_unchecked(
            client,
            CubeCount::Static(shape.heads as u32, sequences, blocks),
            CubeDim::new_1d(UNITS),
            maps::load(saved.q, ROWS),
            maps::load(saved.k, plan.block),
            maps::load(saved.v, plan.block),
            maps::load(out_gradient, ROWS),
            flat(&sums.sums, len),
            flat(sums.drop_keys.as_ref().unwrap_or(&sums.sums), len),
            query_starts,
            key_starts,
            maps::store(gradient, plan.variant.packed),
            sizes(shape, extras),
            scale,
            plan,
        );
    }
    Ok(())
}

/// Third step of [`backward`](super::backward): the gradients of the keys and values, in one or two launches.
#[allow(clippy::too_many_arguments)]
pub fn key_gradients(
    client: &Client,
    shape: &AttentionShape,
    scale: f32,
    extras: &Extras,
    saved: Saved,
    out_gradient: &Tensor4,
    sums: &Sums,
    (k_gradient, v_gradient): (&Tensor4, &Tensor4),
    plans: &[KeyGradientPlan],
) -> Result<(), AttentionError> {
    check_saved(client, shape, extras, &saved, out_gradient)?;
    k_gradient.check("k_gradient", shape.key_shape())?;
    v_gradient.check("v_gradient", shape.value_shape())?;
    let longest = extras.packed.map(|packed| packed.longest_key);
    let (sequences, blocks) = grid(shape, extras, longest, shape.keys, KEY_ROWS);
    let drop_keys = sums.drop_keys.as_ref().unwrap_or(&sums.sums);
    for &plan in plans {
        let (query_starts, key_starts) = starts(extras, &sums.sums);
        // SAFETY: the tensor maps bound every access.
        unsafe {
            key_gradient::key_gradient::launch_unchecked(
                client,
                CubeCount::Static(shape.kv_heads as u32, sequences, blocks),
                CubeDim::new_1d(UNITS),
                maps::load(saved.q, plan.block),
                maps::load(saved.k, ROWS),
                maps::load(saved.v, ROWS),
                maps::load(out_gradient, plan.block),
                maps::statistics(shape, &sums.sums, plan.line(), f32::elem_type_native()),
                maps::statistics(shape, drop_keys, plan.line(), u32::elem_type_native()),
                query_starts,
                key_starts,
                maps::store(k_gradient, plan.variant.packed),
                maps::store(v_gradient, plan.variant.packed),
                sizes(shape, extras),
                scale,
                plan,
            );
        }
    }
    Ok(())
}
