//! Dropout by a hash of an element's position.
use super::{CubeShape, PointwiseError, Vec8, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Longest row.
const LONGEST: usize = 1 << 24;

/// Wellons' 32-bit finaliser `lowbias32`.
#[cube]
pub(crate) fn mix(x: u32) -> u32 {
    let x = (x ^ (x >> 16)) * 0x7feb_352du32;
    let x = (x ^ (x >> 15)) * 0x846c_a68bu32;
    x ^ (x >> 16)
}

/// `mix(mix(x) ^ key)` for `folded = key ^ (key >> 16)`: the last shift of the first `mix` and the first of the second
/// combine to that.
#[cube]
fn mix_twice(x: u32, folded: u32) -> u32 {
    let x = (x ^ (x >> 16)) * 0x7feb_352du32;
    let x = (x ^ (x >> 15)) * 0x846c_a68bu32;
    let x = (x ^ folded) * 0x7feb_352du32;
    let x = (x ^ (x >> 15)) * 0x846c_a68bu32;
    x ^ (x >> 16)
}

/// Drops elements of a vector at column `column` of the row with these two keys.
#[cube]
fn drop_vector<E: Float>(value: Vec8<E>, first_place: u32, a: u32, b: u32, limit: u32, scale: f32) -> Vec8<E> {
    let first = first_place * 0x9e37_79b9u32 + a;
    let folded = b ^ (b >> 16);
    let mut result = Vec8::<E>::empty();
    #[unroll]
    for i in 0..8usize {
        let draw = mix_twice(first + comptime![(i as u32).wrapping_mul(0x9e37_79b9)], folded);
        let kept = f32::cast_from(value.extract(i)) * scale;
        result.insert(i, E::cast_from(select(draw >= limit, kept, 0.0)));
    }
    result
}

/// Cube `(two rows, vectors)`. `keys` are two for each row; columns count from `first_column`.
#[cube(launch_unchecked)]
pub fn drop_out<E: Float>(
    x: &[Vec8<E>],
    keys: &[u32],
    out: &mut [Vec8<E>],
    rows: u32,
    width: u32,
    first_column: u32,
    limit: u32,
    scale: f32,
) {
    let column = CUBE_POS_Y * CUBE_DIM_X + UNIT_POS;
    if column < width {
        let row = CUBE_POS_X * 2;
        // The last of an odd number of rows is computed twice, with the same result.
        let next = min(row + 1, rows - 1);
        let (at, at_next) = ((row * width + column) as usize, (next * width + column) as usize);
        let (value, value_next) = (x[at], x[at_next]);
        let (key, key_next) = ((row * 2) as usize, (next * 2) as usize);
        let (a, b) = (keys[key], keys[key + 1]);
        let (a_next, b_next) = (keys[key_next], keys[key_next + 1]);
        let first_place = first_column + column * 8;
        out[at] = drop_vector(value, first_place, a, b, limit, scale);
        out[at_next] = drop_vector(value_next, first_place, a_next, b_next, limit, scale);
    }
}

/// The parameters of dropout: an element of column `c` is kept if `mix(mix((first_column + c) 0x9e3779b9 + key₀) ^
/// key₁) ≥ limit`, and then multiplied by `scale`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Drop {
    /// Index of column 0.
    pub first_column: u32,
    /// Elements whose hash is below this are dropped.
    pub limit: u32,
    /// Factor of the other elements.
    pub scale: f32,
}

/// Whether there is a kernel for this shape.
pub fn has_kernel(rows: usize, columns: usize) -> bool {
    check_shape(rows, columns).is_ok()
}

fn check_shape(rows: usize, columns: usize) -> Result<(), PointwiseError> {
    check("columns", columns, 8, LONGEST)?;
    check("rows", rows, 1, i32::MAX as usize / (columns / 8))
}

/// `out` from `x [rows, columns]` of type `E` (2 bytes) and `keys [rows, 2]` of `u32`, all without gaps.
pub fn apply<E: Float>(
    client: &Client,
    x: &Handle,
    keys: &Handle,
    out: &Handle,
    (rows, columns): (usize, usize),
    how: Drop,
) -> Result<(), PointwiseError> {
    check_shape(rows, columns)?;
    let (cube, width) = (CubeShape::of(client), columns / 8);
    let (x, out) =
        (buffer("x", x, rows * width, 8 * size_of::<E>())?, buffer("out", out, rows * width, size_of::<Vec8<E>>())?);
    let keys = buffer("keys", keys, 2 * rows, 4)?;
    // SAFETY: every unit stays in its row, and the buffers hold all rows.
    unsafe {
        launch_kernel!(drop_out<E>, client, cube.rows(rows.div_ceil(2), width), cube.dim();
            x, keys, out; rows as u32, width as u32, how.first_column, how.limit, how.scale)
    };
    Ok(())
}
