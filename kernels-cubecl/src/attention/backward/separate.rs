//! The deterministic backward pass: dQ by one kernel, dK and dV by another.
use super::{BackwardStats, Saved, check_saved};
use crate::attention::dkdv::{self, DkDvPlan};
use crate::attention::dq::{self, DqPlan};
use crate::attention::{AttentionError, AttentionShape, CallOptions, Tensor4, UNITS, flat, grid, maps, sizes, starts};
use crate::hopper::mma::ROWS;
use crate::tiling::{CUBE_KEYS, CUBE_QUERIES};
use cubecl::prelude::*;

/// Second step of [`backward`](super::backward): dQ.
pub fn launch_dq(
    client: &Client,
    shape: &AttentionShape,
    scale: f32,
    options: &CallOptions,
    saved: Saved,
    dout: &Tensor4,
    stats: &BackwardStats,
    dq: &Tensor4,
    plan: DqPlan,
) -> Result<(), AttentionError> {
    check_saved(client, shape, options, &saved, dout)?;
    dq.check("dq", shape.query_shape())?;
    let longest = options.packed.map(|packed| packed.longest_query);
    let (sequences, blocks) = grid(shape, options, longest, shape.queries, CUBE_QUERIES);
    let len = 2 * shape.statistics_len();
    let (query_starts, key_starts) = starts(options, &stats.lse_delta);
    // SAFETY: the tensor maps bound every access but those to the statistics. Their rows are padded to whole blocks,
    // and the kernel bounds them itself when sequences are packed.
    unsafe {
        launch_kernel!(dq::attention_dq, client, CubeCount::Static(shape.heads as u32, sequences, blocks),
            CubeDim::new_1d(UNITS);
            maps::load(saved.q, ROWS), maps::load(saved.k, plan.block), maps::load(saved.v, plan.block),
            maps::load(dout, ROWS), flat(&stats.lse_delta, len),
            flat(stats.dropout_keys.as_ref().unwrap_or(&stats.lse_delta), len), query_starts, key_starts,
            maps::store(dq, plan.variant.packed); sizes(shape, options), scale; plan);
    }
    Ok(())
}

/// Third step of [`backward`](super::backward): dK and dV, in one or two launches.
pub fn launch_dkdv(
    client: &Client,
    shape: &AttentionShape,
    scale: f32,
    options: &CallOptions,
    saved: Saved,
    dout: &Tensor4,
    stats: &BackwardStats,
    (dk, dv): (&Tensor4, &Tensor4),
    plans: &[DkDvPlan],
) -> Result<(), AttentionError> {
    check_saved(client, shape, options, &saved, dout)?;
    dk.check("dk", shape.key_shape())?;
    dv.check("dv", shape.value_shape())?;
    let longest = options.packed.map(|packed| packed.longest_key);
    let (sequences, blocks) = grid(shape, options, longest, shape.keys, CUBE_KEYS);
    let dropout_keys = stats.dropout_keys.as_ref().unwrap_or(&stats.lse_delta);
    for &plan in plans {
        let (query_starts, key_starts) = starts(options, &stats.lse_delta);
        // SAFETY: the tensor maps bound every access.
        unsafe {
            launch_kernel!(dkdv::attention_dkdv, client, CubeCount::Static(shape.kv_heads as u32, sequences, blocks),
                CubeDim::new_1d(UNITS);
                maps::load(saved.q, plan.block), maps::load(saved.k, ROWS), maps::load(saved.v, ROWS),
                maps::load(dout, plan.block),
                maps::statistics(shape, &stats.lse_delta, plan.stats_width(), f32::elem_type_native()),
                maps::statistics(shape, dropout_keys, plan.stats_width(), u32::elem_type_native()), query_starts,
                key_starts, maps::store(dk, plan.variant.packed), maps::store(dv, plan.variant.packed);
                sizes(shape, options), scale; plan);
        }
    }
    Ok(())
}
