//! The amax of a tensor, and the scale that follows from it.
//!
//! A maximum does not depend on the order it is taken in: the result has the same bits however the work is split. NaN
//! is ignored here; the cast keeps it.
use super::{Format, Vec8};
use crate::pointwise::{CubeShape, PointwiseError, buffer, check, cube_max};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Cubes of the first pass: several times as many as fit on any current GPU.
const CUBES: usize = 2048;
/// Most elements, for 32-bit positions of vectors.
const MOST: usize = 8 * (u32::MAX as usize / 2);

/// The greatest magnitude of eight numbers and `top`.
#[cube]
pub(crate) fn greatest<E: Float>(x: Vec8<E>, top: f32) -> f32 {
    let mut found = top;
    #[unroll]
    for i in 0..8usize {
        found = max(found, f32::cast_from(x.extract(i)).abs());
    }
    found
}

/// Every cube's amax of its vectors; cubes take them in turns.
#[cube(launch_unchecked)]
pub fn cube_maxima<E: Float>(x: &[Vec8<E>], parts: &mut [f32], vectors: u32, units: u32, #[comptime] cube: CubeShape) {
    let mut scratch = Shared::<[f32]>::new_slice(comptime![cube.scratch()]);
    let mut at = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    let mut top = 0.0f32;
    // Four loads are in flight at a time.
    while at + 3 * units < vectors {
        let a = x[at as usize];
        let b = x[(at + units) as usize];
        let c = x[(at + 2 * units) as usize];
        let d = x[(at + 3 * units) as usize];
        top = greatest::<E>(d, greatest::<E>(c, greatest::<E>(b, greatest::<E>(a, top))));
        at += 4 * units;
    }
    while at < vectors {
        top = greatest::<E>(x[at as usize], top);
        at += units;
    }
    let top = cube_max(top, &mut scratch, cube);
    if UNIT_POS == 0 {
        parts[CUBE_POS_X as usize] = top;
    }
}

/// The maximum of `count` partial results, by one cube.
#[cube(launch_unchecked)]
pub fn greatest_part(parts: &[f32], amax: &mut [f32], count: u32, #[comptime] cube: CubeShape) {
    let mut scratch = Shared::<[f32]>::new_slice(comptime![cube.scratch()]);
    let mut at = UNIT_POS;
    let mut top = 0.0f32;
    while at < count {
        top = max(top, parts[at as usize]);
        at += CUBE_DIM_X;
    }
    let top = cube_max(top, &mut scratch, cube);
    if UNIT_POS == 0 {
        amax[0] = top;
    }
}

/// The scale of a cast for `amax`, which maps it to the format's largest number divided by `2^margin`: `most / amax /
/// 2^margin`. 1 if there is none (`amax` 0, infinite or NaN), the largest finite number instead of infinity
/// (Transformer Engine, `transformer_engine/common/recipe/recipe_common.cuh`).
#[cube]
fn scale_for(amax: f32, most: f32, shrink: f32) -> f32 {
    let usable = amax > 0.0 && amax <= comptime![f32::MAX];
    let divisor = select(usable, amax, 1.0f32);
    let scale = min(most / divisor * shrink, comptime![f32::MAX]);
    select(usable, scale, 1.0f32)
}

/// A unit for each number: `scale` and its reciprocal from `amax`.
#[cube(launch_unchecked)]
pub fn write_scale(amax: &[f32], scale: &mut [f32], inverse: &mut [f32], count: u32, most: f32, shrink: f32) {
    let unit = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if unit < count {
        let at = unit as usize;
        let found = scale_for(amax[at], most, shrink);
        scale[at] = found;
        inverse[at] = 1.0 / found;
    }
}

/// `amax [1] = max |x|`, fp32, of the `len` numbers of `x` of type `E` (2 bytes).
///
/// # Errors
/// If there is no kernel for the length, or a buffer is too short.
pub fn amax<E: Float>(client: &Client, x: &Handle, amax: &Handle, len: usize) -> Result<(), PointwiseError> {
    check("len", len, 8, MOST)?;
    let (vectors, cube) = (len / 8, CubeShape::of(client));
    let cubes = vectors.div_ceil(cube.units as usize).min(CUBES);
    let parts = client.empty(4 * cubes);
    let (x, written) = (buffer("x", x, vectors, 16)?, buffer("parts", &parts, cubes, 4)?);
    let (count, units) = (CubeCount::Static(cubes as u32, 1, 1), cubes as u32 * cube.units);
    // SAFETY: units stay before `vectors`, and every cube writes its own partial result.
    unsafe { cube_maxima::launch_unchecked::<E>(client, count, cube.dim(), x, written, vectors as u32, units, cube) };
    reduce(client, &parts, amax, cubes)
}

/// `amax [1]` of `count` partial results.
pub(crate) fn reduce(client: &Client, parts: &Handle, amax: &Handle, count: usize) -> Result<(), PointwiseError> {
    let (parts, amax) = (buffer("parts", parts, count, 4)?, buffer("amax", amax, 1, 4)?);
    let (one, cube) = (CubeCount::new_single(), CubeShape::of(client));
    // SAFETY: there are `count` partial results.
    unsafe { greatest_part::launch_unchecked(client, one, cube.dim(), parts, amax, count as u32, cube) };
    Ok(())
}

/// `scale [count]` and `inverse [count] = 1 / scale`, fp32, of casts to `format` for `amax [count]`; see [`scale_for`]
/// for zero and numbers that are not finite. The amax becomes the largest number divided by `2^margin`.
///
/// # Errors
/// If there are no numbers, or a buffer is too short.
pub fn scale(
    client: &Client,
    amax: &Handle,
    [scale, inverse]: [&Handle; 2],
    count: usize,
    format: Format,
    margin: i32,
) -> Result<(), PointwiseError> {
    check("count", count, 1, u32::MAX as usize / 2)?;
    let amax = buffer("amax", amax, count, 4)?;
    let (scale, inverse) = (buffer("scale", scale, count, 4)?, buffer("inverse", inverse, count, 4)?);
    let (most, shrink, cube) = (format.max(), 2f32.powi(-margin), CubeShape::of(client));
    let (cubes, dim) = (cube.line(count), cube.dim());
    // SAFETY: units past the last number do nothing.
    unsafe { write_scale::launch_unchecked(client, cubes, dim, amax, scale, inverse, count as u32, most, shrink) };
    Ok(())
}
