//! The last step of a sum over rows that many cubes share: the sums of their shares.
use super::{CubeShape, F32x4, PointwiseError, buffer};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Units side by side, of four columns each: together the 128 bytes of a line of memory.
const SIDE: u32 = 8;
/// Most loads of a unit that are on their way at a time.
const AHEAD: usize = 8;

/// Units side by side.
fn side(cube: CubeShape) -> u32 {
    SIDE.min(cube.units)
}

/// Loads of a unit at a time that share `count` rows out evenly.
fn ahead(cube: CubeShape, count: usize) -> usize {
    let each = count.div_ceil((cube.units / side(cube)) as usize);
    each.div_ceil(each.div_ceil(AHEAD))
}

/// `total[c] = Σ parts[·, c]`, always in the same order. A cube takes four columns for each of its units side by side.
#[cube(launch_unchecked)]
pub fn sum_columns(
    parts: &[F32x4],
    total: &mut [f32],
    count: u32,
    width: u32,
    #[comptime] ahead: usize,
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
            let mut held = Array::<F32x4>::new(ahead);
            // No load waits for a condition: behind the last row it is read again.
            #[unroll]
            for k in 0..ahead {
                let row = min(part + comptime![k as u32] * lanes, count - 1);
                held[k] = parts[(row * width + column) as usize];
            }
            #[unroll]
            for k in 0..ahead {
                if part + comptime![k as u32] * lanes < count {
                    sum += held[k];
                }
            }
            part += comptime![ahead as u32] * lanes;
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

/// Sums `count` rows of `parts`, fp32 `[count, columns]`, into `total`. `columns` are a multiple of 4.
pub(super) fn sum_parts(
    client: &Client,
    parts: &Handle,
    total: &Handle,
    count: usize,
    columns: usize,
) -> Result<(), PointwiseError> {
    let width = columns / 4;
    let (parts, total) = (buffer("parts", parts, count * width, 16)?, buffer("total", total, columns, 4)?);
    let cube = CubeShape::of(client);
    // SAFETY: units past the last column do nothing, and the buffers hold all columns.
    unsafe {
        sum_columns::launch_unchecked(
            client,
            CubeCount::Static((width as u32).div_ceil(side(cube)), 1, 1),
            cube.dim(),
            parts,
            total,
            count as u32,
            width as u32,
            ahead(cube, count),
            cube,
        )
    };
    Ok(())
}
