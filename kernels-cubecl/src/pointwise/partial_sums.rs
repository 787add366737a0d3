//! The second pass of a sum over rows that is split among cubes: adds up their partial sums.
use super::{CubeShape, F32x4, PointwiseError, buffer};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Neighbouring units, of four columns each: together the 128 bytes of a cache line.
const SIDE: u32 = 8;
/// Most loads of a unit in flight.
const IN_FLIGHT: usize = 8;

/// Neighbouring units.
fn side(cube: CubeShape) -> u32 {
    SIDE.min(cube.units)
}

/// Loads in flight that distribute `count` rows evenly.
fn in_flight(cube: CubeShape, count: usize) -> usize {
    let each = count.div_ceil((cube.units / side(cube)) as usize);
    each.div_ceil(each.div_ceil(IN_FLIGHT))
}

/// `total[c] = Σ partials[·, c]`, always in the same order. A cube takes four columns for each of its neighbouring
/// units.
#[cube(launch_unchecked)]
pub fn sum_columns(
    partials: &[F32x4],
    total: &mut [f32],
    count: u32,
    width: u32,
    #[comptime] in_flight: usize,
    #[comptime] cube: CubeShape,
) {
    let mut scratch = Shared::<[F32x4]>::new_slice(comptime![cube.units as usize]);
    let side = comptime![side(cube)];
    let lanes = comptime![cube.units / side];
    let column = CUBE_POS_X * side + UNIT_POS % side;
    let mut sum = F32x4::new(0.0);
    if column < width {
        let mut part = UNIT_POS / side;
        while part < count {
            let mut held = Array::<F32x4>::new(in_flight);
            // No load depends on a condition, which would hold back the loads after it: past the last row, that row is
            // read again.
            #[unroll]
            for k in 0..in_flight {
                let row = min(part + comptime![k as u32] * lanes, count - 1);
                held[k] = partials[(row * width + column) as usize];
            }
            #[unroll]
            for k in 0..in_flight {
                if part + comptime![k as u32] * lanes < count {
                    sum += held[k];
                }
            }
            part += comptime![in_flight as u32] * lanes;
        }
    }
    scratch[UNIT_POS as usize] = sum;
    sync_cube();
    if UNIT_POS < side && column < width {
        let mut all = F32x4::new(0.0);
        #[unroll]
        for i in 0..comptime![lanes as usize] {
            all += scratch[UNIT_POS as usize + comptime![i * side as usize]];
        }
        #[unroll]
        for i in 0..4usize {
            total[(column * 4) as usize + i] = all.extract(i);
        }
    }
}

/// Sums `count` rows of `partials`, fp32 `[count, columns]`, into `total`. `columns` is a multiple of 4.
pub(crate) fn sum_partials(
    client: &Client,
    partials: &Handle,
    total: &Handle,
    count: usize,
    columns: usize,
) -> Result<(), PointwiseError> {
    let width = columns / 4;
    let (partials, total) = (buffer("parts", partials, count * width, 16)?, buffer("total", total, columns, 4)?);
    let cube = CubeShape::of(client);
    // SAFETY: units past the last column do nothing, and the buffers hold all columns.
    unsafe {
        launch_kernel!(sum_columns, client, CubeCount::Static((width as u32).div_ceil(side(cube)), 1, 1), cube.dim();
            partials, total; count as u32, width as u32; in_flight(cube, count), cube)
    };
    Ok(())
}
