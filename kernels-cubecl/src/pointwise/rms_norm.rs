//! `y = w x / √(mean(x²) + eps)` over rows, and its gradients.
use super::{PointwiseError, SCRATCH, UNITS, Vec8, buffer, check, cube_sums};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Longest row: what a cube's registers hold.
const LONGEST: usize = 16384;
/// Most cubes of a backward pass: enough to fill any card of today, few enough that their shares are cheap to sum.
pub(super) const PARTS: usize = 528;
/// Columns a cube of the last reduction owns, and rows it reads at a time.
const COLUMNS: u32 = 32;
const LANES: u32 = UNITS / COLUMNS;

#[cube(launch_unchecked)]
pub fn rms_norm_forward<E: Float>(
    x: &[Vec8<E>],
    w: &[Vec8<E>],
    y: &mut [Vec8<E>],
    eps: f32,
    width: u32,
    #[comptime] vectors: usize,
) {
    let mut scratch = Shared::<[f32]>::new_slice(SCRATCH);
    let row = (CUBE_POS_X * width) as usize;
    let mut held = Array::<Vec8<E>>::new(vectors);
    let mut squares = 0.0f32;
    #[unroll]
    for v in 0..vectors {
        let column = UNIT_POS + comptime![v as u32 * UNITS];
        if column < width {
            let value = x[row + column as usize];
            held[v] = value;
            #[unroll]
            for i in 0..8usize {
                let value = f32::cast_from(value.extract(i));
                squares += value * value;
            }
        }
    }
    let (squares, _) = cube_sums(squares, 0.0, &mut scratch, 0u32);
    let factor = 1.0 / (squares / (width * 8) as f32 + eps).sqrt();
    #[unroll]
    for v in 0..vectors {
        let column = UNIT_POS + comptime![v as u32 * UNITS];
        if column < width {
            let (value, weight) = (held[v], w[column as usize]);
            let mut result = Vec8::<E>::empty();
            #[unroll]
            for i in 0..8usize {
                let value = f32::cast_from(value.extract(i)) * factor * f32::cast_from(weight.extract(i));
                result.insert(i, E::cast_from(value));
            }
            y[row + column as usize] = result;
        }
    }
}

/// This unit's vectors of a row, if there is such a row.
#[cube]
pub(super) fn read_row<E: Float>(
    from: &[Vec8<E>],
    to: &mut Array<Vec8<E>>,
    row: u32,
    rows: u32,
    width: u32,
    #[comptime] vectors: usize,
) {
    #[unroll]
    for v in 0..vectors {
        let column = UNIT_POS + comptime![v as u32 * UNITS];
        if row < rows && column < width {
            to[v] = from[(row * width + column) as usize];
        }
    }
}

/// Every cube takes every `CUBE_COUNT_X`th row and leaves its share of the gradient of `w` in a row of `parts`.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn rms_norm_backward<E: Float>(
    x: &[Vec8<E>],
    w: &[Vec8<E>],
    y_gradient: &[Vec8<E>],
    x_gradient: &mut [Vec8<E>],
    parts: &mut [f32],
    eps: f32,
    rows: u32,
    width: u32,
    #[comptime] vectors: usize,
) {
    let mut scratch = Shared::<[f32]>::new_slice(SCRATCH);
    let mut w_sum = Array::<f32>::new(comptime![vectors * 8]);
    #[unroll]
    for i in 0..comptime![vectors * 8] {
        w_sum[i] = 0.0;
    }
    let mut values = Array::<Vec8<E>>::new(vectors);
    let mut slopes = Array::<Vec8<E>>::new(vectors);
    read_row(x, &mut values, CUBE_POS_X, rows, width, vectors);
    read_row(y_gradient, &mut slopes, CUBE_POS_X, rows, width, vectors);
    let mut row = CUBE_POS_X;
    let mut turn = 0u32;
    while row < rows {
        let mut squares = 0.0f32;
        let mut product = 0.0f32;
        #[unroll]
        for v in 0..vectors {
            let column = UNIT_POS + comptime![v as u32 * UNITS];
            if column < width {
                let (value, slope, weight) = (values[v], slopes[v], w[column as usize]);
                #[unroll]
                for i in 0..8usize {
                    let value = f32::cast_from(value.extract(i));
                    squares += value * value;
                    product += value * f32::cast_from(slope.extract(i)) * f32::cast_from(weight.extract(i));
                }
            }
        }
        // The next row is on its way while this one's sums are taken.
        let mut next_values = Array::<Vec8<E>>::new(vectors);
        let mut next_slopes = Array::<Vec8<E>>::new(vectors);
        read_row(x, &mut next_values, row + CUBE_COUNT_X, rows, width, vectors);
        read_row(y_gradient, &mut next_slopes, row + CUBE_COUNT_X, rows, width, vectors);
        let (squares, product) = cube_sums(squares, product, &mut scratch, turn);
        turn = 1 - turn;
        let factor = 1.0 / (squares / (width * 8) as f32 + eps).sqrt();
        let common = product * factor * factor * factor / (width * 8) as f32;
        #[unroll]
        for v in 0..vectors {
            let column = UNIT_POS + comptime![v as u32 * UNITS];
            if column < width {
                let (value, slope, weight) = (values[v], slopes[v], w[column as usize]);
                let mut result = Vec8::<E>::empty();
                #[unroll]
                for i in 0..8usize {
                    let (value, slope) = (f32::cast_from(value.extract(i)), f32::cast_from(slope.extract(i)));
                    let weight = f32::cast_from(weight.extract(i));
                    result.insert(i, E::cast_from(slope * weight * factor - value * common));
                    w_sum[comptime![v * 8 + i]] = w_sum[comptime![v * 8 + i]] + slope * value * factor;
                }
                x_gradient[(row * width + column) as usize] = result;
            }
            values[v] = next_values[v];
            slopes[v] = next_slopes[v];
        }
        row += CUBE_COUNT_X;
    }
    #[unroll]
    for v in 0..vectors {
        let column = UNIT_POS + comptime![v as u32 * UNITS];
        if column < width {
            #[unroll]
            for i in 0..8usize {
                parts[((CUBE_POS_X * width + column) * 8) as usize + i] = w_sum[comptime![v * 8 + i]];
            }
        }
    }
}

/// `w_gradient[c] = Σ parts[·, c]`, always in the same order.
#[cube(launch_unchecked)]
fn sum_columns(parts: &[f32], w_gradient: &mut [f32], count: u32, columns: u32) {
    let mut scratch = Shared::<[f32]>::new_slice(comptime![UNITS as usize]);
    let column = CUBE_POS_X * COLUMNS + UNIT_POS % COLUMNS;
    let mut sum = 0.0f32;
    if column < columns {
        let mut part = UNIT_POS / COLUMNS;
        while part < count {
            sum += parts[(part * columns + column) as usize];
            part += LANES;
        }
    }
    scratch[UNIT_POS as usize] = sum;
    sync_cube();
    if UNIT_POS < COLUMNS && column < columns {
        let mut total = 0.0f32;
        #[unroll]
        for i in 0..comptime![LANES as usize] {
            total += scratch[UNIT_POS as usize + comptime![i * COLUMNS as usize]];
        }
        w_gradient[column as usize] = total;
    }
}

/// Whether there is a kernel for rows of this length.
pub fn has_kernel(columns: usize) -> bool {
    check("columns", columns, 8, LONGEST).is_ok()
}

/// `y [rows, columns]` from `x` and `w [columns]`, of type `E` (2 bytes) and without gaps; the sum of squares in fp32.
pub fn forward<E: Float>(
    client: &Client,
    (x, w): (&Handle, &Handle),
    y: &Handle,
    eps: f32,
    rows: usize,
    columns: usize,
) -> Result<(), PointwiseError> {
    check("columns", columns, 8, LONGEST)?;
    let width = columns / 8;
    let (x, w) = (buffer("x", x, rows * width, 16)?, buffer("w", w, width, 16)?);
    let y = buffer("y", y, rows * width, 16)?;
    // SAFETY: every cube stays in its row, and the buffers hold all rows.
    unsafe {
        rms_norm_forward::launch_unchecked::<E>(
            client,
            CubeCount::Static(rows as u32, 1, 1),
            CubeDim::new_1d(UNITS),
            x,
            w,
            y,
            eps,
            width as u32,
            width.div_ceil(UNITS as usize),
        )
    };
    Ok(())
}

/// Sums `count` rows of `parts`, fp32 `[count, columns]`, into `total`.
pub(super) fn sum_parts(
    client: &Client,
    parts: &Handle,
    total: &Handle,
    count: usize,
    columns: usize,
) -> Result<(), PointwiseError> {
    let (parts, total) = (buffer("parts", parts, count * columns, 4)?, buffer("w_gradient", total, columns, 4)?);
    // SAFETY: units past the last column do nothing, and the buffers hold all columns.
    unsafe {
        sum_columns::launch_unchecked(
            client,
            CubeCount::Static((columns as u32).div_ceil(COLUMNS), 1, 1),
            CubeDim::new_1d(UNITS),
            parts,
            total,
            count as u32,
            columns as u32,
        )
    };
    Ok(())
}

/// The gradients of `x` (type `E`) and `w` (fp32 `[columns]`) in [`forward`], given that of `y`. Deterministic.
#[allow(clippy::too_many_arguments)]
pub fn backward<E: Float>(
    client: &Client,
    (x, w): (&Handle, &Handle),
    y_gradient: &Handle,
    (x_gradient, w_gradient): (&Handle, &Handle),
    eps: f32,
    rows: usize,
    columns: usize,
) -> Result<(), PointwiseError> {
    check("columns", columns, 8, LONGEST)?;
    let width = columns / 8;
    let cubes = rows.min(PARTS);
    let parts = client.empty(4 * cubes * columns);
    let (x, w) = (buffer("x", x, rows * width, 16)?, buffer("w", w, width, 16)?);
    let y_gradient = buffer("y_gradient", y_gradient, rows * width, 16)?;
    let x_gradient = buffer("x_gradient", x_gradient, rows * width, 16)?;
    let written = buffer("parts", &parts, cubes * columns, 4)?;
    buffer("w_gradient", w_gradient, columns, 4)?;
    // SAFETY: every cube stays in its rows, and the buffers hold all rows.
    unsafe {
        rms_norm_backward::launch_unchecked::<E>(
            client,
            CubeCount::Static(cubes as u32, 1, 1),
            CubeDim::new_1d(UNITS),
            x,
            w,
            y_gradient,
            x_gradient,
            written,
            eps,
            rows as u32,
            width as u32,
            width.div_ceil(UNITS as usize),
        )
    };
    sum_parts(client, &parts, w_gradient, cubes, columns)
}
