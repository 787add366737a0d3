//! The row sums that the backward kernels subtract.
use super::row;
use super::sight::Sizes;
use cubecl::prelude::*;

/// `delta = Σ out · out_gradient`. Cube `(block of queries, head, batch)`, a unit for each query.
#[cube(launch_unchecked)]
pub fn delta<E: Float>(
    out: &Tensor<E>,
    out_gradient: &Tensor<E>,
    delta: &mut [f32],
    sizes: &Sizes,
    #[comptime] value_dim: usize,
) {
    let query = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    let (head, batch) = (CUBE_POS_Y, CUBE_POS_Z);
    if query < sizes.queries {
        let mut slope = Array::<f32>::new(value_dim);
        row::read(out_gradient, row::at(out_gradient, query, batch, head), &mut slope, value_dim);
        let place = (batch * CUBE_COUNT_Y + head) * sizes.statistics + query;
        delta[place as usize] = row::dot(out, row::at(out, query, batch, head), &slope, value_dim);
    }
}
