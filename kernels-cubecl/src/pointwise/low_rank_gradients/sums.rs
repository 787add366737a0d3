//! The second pass: adds up the cubes' partial sums.
use crate::pointwise::{CubeShape, F32x4, PointwiseError, buffer};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Partial sums: `[blocks, count, len]` in fp32.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parts {
    /// Terms of a sum.
    pub count: usize,
    /// Numbers of a block, rows of `inner`.
    pub len: usize,
    /// Numbers of a row, a multiple of four.
    pub inner: usize,
    /// Blocks, which are neighbours in each row of the result.
    pub blocks: usize,
}

/// A unit for four numbers. Cube `(numbers, blocks)`.
#[cube(launch_unchecked)]
pub fn add_parts<O: Float>(
    parts: &[F32x4],
    out: &mut [Vector<O, Const<4>>],
    vectors: u32,
    count: u32,
    inner: u32,
    #[comptime] add: bool,
) {
    let at = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if at < vectors {
        let (row, column) = (at / inner, at % inner);
        let to = ((row * CUBE_COUNT_Y + CUBE_POS_Y) * inner + column) as usize;
        let mut sum = F32x4::new(0.0);
        let mut from = CUBE_POS_Y * count * vectors + at;
        let mut left = count;
        // Four loads are in flight at a time.
        while left >= 4 {
            let (a, b) = (parts[from as usize], parts[(from + vectors) as usize]);
            let (c, d) = (parts[(from + 2 * vectors) as usize], parts[(from + 3 * vectors) as usize]);
            sum = sum + a + b + c + d;
            from += 4 * vectors;
            left -= 4;
        }
        while left > 0 {
            sum += parts[from as usize];
            from += vectors;
            left -= 1;
        }
        if comptime![add] {
            sum += F32x4::cast_from(out[to]);
        }
        out[to] = Vector::<O, Const<4>>::cast_from(sum);
    }
}

/// Writes the sums to `out`, or adds them.
pub(super) fn sum<O: Float>(
    client: &Client,
    parts: &Handle,
    out: &Handle,
    Parts { count, len, inner, blocks }: Parts,
    add: bool,
) -> Result<(), PointwiseError> {
    let (cube, vectors) = (CubeShape::of(client), len / 4);
    let parts = buffer("parts", parts, blocks * count * vectors, 16)?;
    let out = buffer("sum", out, blocks * vectors, 4 * size_of::<O>())?;
    let cubes = CubeCount::Static((vectors as u32).div_ceil(cube.units), blocks as u32, 1);
    // SAFETY: units past the last vector do nothing, and the buffers hold all.
    unsafe {
        launch_kernel!(add_parts<O>, client, cubes, cube.dim();
            parts, out; vectors as u32, count as u32, (inner / 4) as u32; add)
    };
    Ok(())
}
