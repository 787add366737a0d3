//! The fused backward pass: dQ, dK and dV by one kernel.
use super::{BackwardStats, Gradients, Saved, check_saved};
use crate::attention::dqdkdv::{self, DqDkDvPlan};
use crate::attention::{AttentionError, AttentionShape, BitMask, CallOptions, Tensor4};
use crate::attention::{UNITS, grid, maps, masks, sizes, starts};
use crate::{attention::dq_accum, hopper::mma::ROWS, tiling::CUBE_KEYS};
use cubecl::prelude::*;

/// Second and last step of [`backward`](super::backward) where one kernel computes dQ, dK and dV.
pub fn launch_dqdkdv(
    client: &Client,
    shape: &AttentionShape,
    scale: f32,
    options: &CallOptions,
    saved: Saved,
    dout: &Tensor4,
    stats: &BackwardStats,
    gradients: Gradients,
    plan: DqDkDvPlan,
) -> Result<(), AttentionError> {
    check_saved(client, shape, options, &saved, dout)?;
    gradients.dq.check("dq", shape.query_shape())?;
    gradients.dk.check("dk", shape.key_shape())?;
    gradients.dv.check("dv", shape.value_shape())?;
    let longest_key = options.packed.map(|packed| packed.longest_key);
    let longest_query = options.packed.map(|packed| packed.longest_query);
    let (sequences, key_blocks) = grid(shape, options, longest_key, shape.keys, CUBE_KEYS);
    let (_, query_blocks) = grid(shape, options, longest_query, shape.queries, plan.block());
    let len = dq_accum::len(shape, options);
    let dq_accum = client.empty(4 * len);
    // SAFETY: the buffer was allocated with this size just above.
    let dq_accum_arg = || unsafe { BufferArg::from_raw_parts(dq_accum.clone(), len / 4) };
    let packed = plan.variant.packed;
    let (query_starts, key_starts) = starts(options, &stats.lse_delta);
    let (dq_starts, _) = starts(options, &stats.lse_delta);
    let rows_of = |mask: Option<&BitMask>| mask.map_or_else(|| masks::no_mask(&stats.lse_delta), BitMask::of_keys);
    let (hidden, hidden_rows) = rows_of(options.masks.hidden);
    let (kept, kept_rows) = rows_of(options.masks.kept.map(|(mask, _)| mask));
    let [by_row, by_batch, by_head] = gradients.dq.strides.map(|stride| (stride / 8) as u32);
    // SAFETY: the tensor maps bound every access but those to the dQ accumulator, which has a block for every q block
    // of every sequence and one more, and to masks, which are of the call's shape and not read past their last row and
    // word; `convert_dq` writes only rows that exist.
    unsafe {
        launch_kernel!(dq_accum::clear_dq_accum, client,
            CubeCount::Static((len / 4).div_ceil(8 * UNITS as usize).min(1 << 16) as u32, 1, 1), CubeDim::new_1d(UNITS);
            dq_accum_arg());
        launch_kernel!(dqdkdv::attention_dqdkdv, client,
            CubeCount::Static(shape.kv_heads as u32, sequences, key_blocks), CubeDim::new_1d(UNITS);
            maps::load(saved.q, plan.block()), maps::load(saved.k, ROWS), maps::load(saved.v, ROWS),
            maps::load(dout, plan.block()),
            maps::statistics(shape, &stats.lse_delta, plan.stats_width(), f32::elem_type_native()), hidden, kept,
            query_starts, key_starts, dq_accum_arg(), maps::store(gradients.dk, packed),
            maps::store(gradients.dv, packed); hidden_rows, kept_rows, sizes(shape, options), scale; plan);
        let (count, dq) = (CubeCount::Static(query_blocks, shape.heads as u32, sequences), gradients.dq);
        by_half!(options.element, E => {
            launch_kernel!(dq_accum::convert_dq<E>, client, count, CubeDim::new_1d(UNITS);
                dq_accum_arg(), BufferArg::from_raw_parts(dq.handle.clone(), dq.extent() / 8), dq_starts;
                shape.queries as u32, dq_accum::blocks_of_head(shape, options) as u32, by_row, by_batch, by_head, scale;
                packed, plan.head_dim())
        });
    }
    Ok(())
}
