//! `delta` of each query, which the backward kernels subtract from dP.
use super::mask::Sizes;
use super::row;
use cubecl::prelude::*;

/// `delta = Σ out · dout`. Cube `(q block, head, batch)`, a unit for each query.
#[cube(launch_unchecked)]
pub fn portable_delta<E: Float>(
    out: &Tensor<E>,
    dout: &Tensor<E>,
    delta: &mut [f32],
    sizes: &Sizes,
    #[comptime] value_dim: usize,
) {
    let query = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    let (head, batch) = (CUBE_POS_Y, CUBE_POS_Z);
    if query < sizes.queries {
        let mut dout_row = Array::<f32>::new(value_dim);
        row::read(dout, row::at(dout, query, batch, head), &mut dout_row, value_dim);
        let stats_index = (batch * CUBE_COUNT_Y + head) * sizes.statistics + query;
        delta[stats_index as usize] = row::dot(out, row::at(out, query, batch, head), &dout_row, value_dim);
    }
}
