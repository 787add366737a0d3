//! Merges the partial results of a sequence's splits.
#![allow(missing_docs, reason = "the launch macros write public items without documentation")]

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::DecodeShape;
use crate::hopper::ptx;
use crate::pointwise::{CubeShape, PointwiseError, buffer};

/// A score below this belongs to a split without keys.
pub(super) const NO_KEY: f32 = -1.0e30;

/// A unit for each number of the output. `partials [splits, rows, head_dim]` are sums of values, each weighted with
/// `2^(score - greatest)`; `statistics [splits, rows, 2]` are that greatest score and the sum of the weights.
#[cube(launch_unchecked)]
pub fn merge_splits<E: Float>(
    partials: &[f32],
    statistics: &[f32],
    out: &mut [E],
    rows: u32,
    splits: u32,
    #[comptime] head_dim: u32,
) {
    let item = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    let row = item / head_dim;
    if row < rows {
        let mut greatest = f32::new(comptime![NO_KEY as f64]);
        for split in 0..splits {
            greatest = max(greatest, statistics[(2 * (split * rows + row)) as usize]);
        }
        let mut total = 0.0f32;
        let mut sum = 0.0f32;
        for split in 0..splits {
            let at = split * rows + row;
            let weight = ptx::exp2(statistics[(2 * at) as usize] - greatest);
            total += weight * statistics[(2 * at + 1) as usize];
            sum += weight * partials[(at * head_dim + item % head_dim) as usize];
        }
        // A sequence without keys gets zeros.
        out[item as usize] = E::cast_from(select(total > 0.0, sum / max(total, 1.0e-30f32), 0.0f32));
    }
}

/// `out [sequences, heads, head_dim]` from the partial results of `splits` splits.
pub(super) fn merge<E: Float>(
    client: &Client,
    shape: DecodeShape,
    splits: usize,
    [partials, statistics]: [&Handle; 2],
    out: &Handle,
) -> Result<(), PointwiseError> {
    let rows = shape.sequences * shape.heads;
    let items = rows * shape.head_dim;
    let cube = CubeShape::of(client);
    // SAFETY: units past the last number do nothing; the buffers hold all that the others access.
    unsafe {
        launch_kernel!(merge_splits<E>, client, cube.line(items), cube.dim();
            buffer("partials", partials, splits * items, 4)?, buffer("statistics", statistics, splits * rows * 2, 4)?,
            buffer("out", out, items, size_of::<E>())?; rows as u32, splits as u32; shape.head_dim as u32)
    };
    Ok(())
}
