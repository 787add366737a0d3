//! The last step of a sum over rows that many cubes share: the sums of their shares.
use super::{CubeShape, PointwiseError, buffer};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Most cubes of a pass over rows: enough to fill any card of today, few enough that their shares are cheap to sum.
pub(super) const PARTS: usize = 528;
/// Units of a cube for each of its columns.
const LANES: u32 = 32;

/// Columns that a cube owns: on a GPU as many as the 32 bytes hold that memory is read in.
fn columns_of(cube: CubeShape) -> u32 {
    (cube.units / LANES).max(1)
}

/// `total[c] = Σ parts[·, c]`, always in the same order.
#[cube(launch_unchecked)]
fn sum_columns(parts: &[f32], total: &mut [f32], count: u32, columns: u32, #[comptime] cube: CubeShape) {
    let mut scratch = Shared::<[f32]>::new_slice(comptime![cube.units as usize]);
    let own = comptime![columns_of(cube)];
    let lanes = comptime![cube.units / own];
    let column = CUBE_POS_X * own + UNIT_POS % own;
    let mut sum = 0.0f32;
    if column < columns {
        let mut part = UNIT_POS / own;
        // Four loads are on their way at a time.
        while part + 3 * lanes < count {
            let a = parts[(part * columns + column) as usize];
            let b = parts[((part + lanes) * columns + column) as usize];
            let c = parts[((part + 2 * lanes) * columns + column) as usize];
            let d = parts[((part + 3 * lanes) * columns + column) as usize];
            sum += (a + b) + (c + d);
            part += 4 * lanes;
        }
        while part < count {
            sum += parts[(part * columns + column) as usize];
            part += lanes;
        }
    }
    scratch[UNIT_POS as usize] = sum;
    sync_cube();
    if UNIT_POS < own && column < columns {
        let mut all = 0.0f32;
        #[unroll]
        for i in 0..comptime![lanes as usize] {
            all += scratch[UNIT_POS as usize + comptime![i * own as usize]];
        }
        total[column as usize] = all;
    }
}

/// Sums `count` rows of `parts`, fp32 `[count, columns]`, into `total`.
pub(super) fn sum_parts(
    client: &Client,
    parts: &Handle,
    total: &Handle,
    count: usize,
    columns: usize,
) -> Result<(), PointwiseError> {
    let (parts, total) = (buffer("parts", parts, count * columns, 4)?, buffer("total", total, columns, 4)?);
    let cube = CubeShape::of(client);
    // SAFETY: units past the last column do nothing, and the buffers hold all columns.
    unsafe {
        sum_columns::launch_unchecked(
            client,
            CubeCount::Static((columns as u32).div_ceil(columns_of(cube)), 1, 1),
            cube.dim(),
            parts,
            total,
            count as u32,
            columns as u32,
            cube,
        )
    };
    Ok(())
}
