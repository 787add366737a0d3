//! `y = w (x − mean) / √(var + eps) + b` over rows, and its gradients. The variance is that of the centred row: taken from
//! the mean of squares it would lose the digits that the mean has.
use super::rms_norm::{PARTS, read_row, sum_parts};
use super::{PointwiseError, SCRATCH, UNITS, Vec8, buffer, check, cube_sums};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Longest row: what a cube's registers hold in the backward pass.
const LONGEST: usize = 8192;

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn layer_norm_forward<E: Float>(
    x: &[Vec8<E>],
    w: &[Vec8<E>],
    b: &[Vec8<E>],
    y: &mut [Vec8<E>],
    eps: f32,
    width: u32,
    #[comptime] vectors: usize,
) {
    let mut scratch = Shared::<[f32]>::new_slice(SCRATCH);
    let row = (CUBE_POS_X * width) as usize;
    let mut held = Array::<Vec8<E>>::new(vectors);
    let mut sum = 0.0f32;
    #[unroll]
    for v in 0..vectors {
        let column = UNIT_POS + comptime![v as u32 * UNITS];
        if column < width {
            let value = x[row + column as usize];
            held[v] = value;
            #[unroll]
            for i in 0..8usize {
                sum += f32::cast_from(value.extract(i));
            }
        }
    }
    let (sum, _) = cube_sums(sum, 0.0, &mut scratch, 0u32);
    let mean = sum / (width * 8) as f32;
    let mut squares = 0.0f32;
    #[unroll]
    for v in 0..vectors {
        let column = UNIT_POS + comptime![v as u32 * UNITS];
        if column < width {
            let value = held[v];
            #[unroll]
            for i in 0..8usize {
                let centred = f32::cast_from(value.extract(i)) - mean;
                squares += centred * centred;
            }
        }
    }
    let (squares, _) = cube_sums(squares, 0.0, &mut scratch, 1u32);
    let factor = 1.0 / (squares / (width * 8) as f32 + eps).sqrt();
    #[unroll]
    for v in 0..vectors {
        let column = UNIT_POS + comptime![v as u32 * UNITS];
        if column < width {
            let (value, weight, bias) = (held[v], w[column as usize], b[column as usize]);
            let mut result = Vec8::<E>::empty();
            #[unroll]
            for i in 0..8usize {
                let normal = (f32::cast_from(value.extract(i)) - mean) * factor;
                let value = normal * f32::cast_from(weight.extract(i)) + f32::cast_from(bias.extract(i));
                result.insert(i, E::cast_from(value));
            }
            y[row + column as usize] = result;
        }
    }
}

/// Every cube takes every `CUBE_COUNT_X`th row and leaves its shares of the gradients of `w` and `b`, one behind the other,
/// in a row of `parts`.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn layer_norm_backward<E: Float>(
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
    let mut b_sum = Array::<f32>::new(comptime![vectors * 8]);
    #[unroll]
    for i in 0..comptime![vectors * 8] {
        w_sum[i] = 0.0;
        b_sum[i] = 0.0;
    }
    let columns = (width * 8) as f32;
    let mut values = Array::<Vec8<E>>::new(vectors);
    let mut slopes = Array::<Vec8<E>>::new(vectors);
    read_row(x, &mut values, CUBE_POS_X, rows, width, vectors);
    read_row(y_gradient, &mut slopes, CUBE_POS_X, rows, width, vectors);
    let mut row = CUBE_POS_X;
    while row < rows {
        let mut sum = 0.0f32;
        let mut slope_sum = 0.0f32;
        #[unroll]
        for v in 0..vectors {
            let column = UNIT_POS + comptime![v as u32 * UNITS];
            if column < width {
                let (value, slope, weight) = (values[v], slopes[v], w[column as usize]);
                #[unroll]
                for i in 0..8usize {
                    sum += f32::cast_from(value.extract(i));
                    slope_sum += f32::cast_from(slope.extract(i)) * f32::cast_from(weight.extract(i));
                }
            }
        }
        // The next row is on its way while this one's sums are taken.
        let mut next_values = Array::<Vec8<E>>::new(vectors);
        let mut next_slopes = Array::<Vec8<E>>::new(vectors);
        read_row(x, &mut next_values, row + CUBE_COUNT_X, rows, width, vectors);
        read_row(y_gradient, &mut next_slopes, row + CUBE_COUNT_X, rows, width, vectors);
        let (sum, slope_sum) = cube_sums(sum, slope_sum, &mut scratch, 0u32);
        let mean = sum / columns;
        let mut squares = 0.0f32;
        let mut product = 0.0f32;
        #[unroll]
        for v in 0..vectors {
            let column = UNIT_POS + comptime![v as u32 * UNITS];
            if column < width {
                let (value, slope, weight) = (values[v], slopes[v], w[column as usize]);
                #[unroll]
                for i in 0..8usize {
                    let centred = f32::cast_from(value.extract(i)) - mean;
                    squares += centred * centred;
                    product += centred * f32::cast_from(slope.extract(i)) * f32::cast_from(weight.extract(i));
                }
            }
        }
        let (squares, product) = cube_sums(squares, product, &mut scratch, 1u32);
        let factor = 1.0 / (squares / columns + eps).sqrt();
        let along = product * factor * factor / columns;
        let slope_mean = slope_sum / columns;
        #[unroll]
        for v in 0..vectors {
            let column = UNIT_POS + comptime![v as u32 * UNITS];
            if column < width {
                let (value, slope, weight) = (values[v], slopes[v], w[column as usize]);
                let mut result = Vec8::<E>::empty();
                #[unroll]
                for i in 0..8usize {
                    let centred = f32::cast_from(value.extract(i)) - mean;
                    let slope = f32::cast_from(slope.extract(i));
                    let weighted = slope * f32::cast_from(weight.extract(i));
                    result.insert(i, E::cast_from((weighted - slope_mean - centred * along) * factor));
                    w_sum[comptime![v * 8 + i]] = w_sum[comptime![v * 8 + i]] + slope * centred * factor;
                    b_sum[comptime![v * 8 + i]] = b_sum[comptime![v * 8 + i]] + slope;
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
            let w_at = (CUBE_POS_X * 2 * width + column) * 8;
            let b_at = (CUBE_POS_X * 2 * width + width + column) * 8;
            #[unroll]
            for i in 0..8usize {
                parts[w_at as usize + i] = w_sum[comptime![v * 8 + i]];
                parts[b_at as usize + i] = b_sum[comptime![v * 8 + i]];
            }
        }
    }
}

/// Whether there is a kernel for rows of this length.
pub fn has_kernel(columns: usize) -> bool {
    check("columns", columns, 8, LONGEST).is_ok()
}

/// `y [rows, columns]` from `x`, `w` and `b [columns]`, of type `E` (2 bytes) and without gaps; statistics in fp32.
pub fn forward<E: Float>(
    client: &Client,
    x: &Handle,
    (w, b): (&Handle, &Handle),
    y: &Handle,
    eps: f32,
    rows: usize,
    columns: usize,
) -> Result<(), PointwiseError> {
    check("columns", columns, 8, LONGEST)?;
    let width = columns / 8;
    let (x, y) = (buffer("x", x, rows * width, 16)?, buffer("y", y, rows * width, 16)?);
    let (w, b) = (buffer("w", w, width, 16)?, buffer("b", b, width, 16)?);
    // SAFETY: every cube stays in its row, and the buffers hold all rows.
    unsafe {
        layer_norm_forward::launch_unchecked::<E>(
            client,
            CubeCount::Static(rows as u32, 1, 1),
            CubeDim::new_1d(UNITS),
            x,
            w,
            b,
            y,
            eps,
            width as u32,
            width.div_ceil(UNITS as usize),
        )
    };
    Ok(())
}

/// The gradients of `x` (type `E`) and of `w` and `b` (fp32 `[2, columns]`) in [`forward`], given that of `y`. Deterministic.
#[allow(clippy::too_many_arguments)]
pub fn backward<E: Float>(
    client: &Client,
    (x, w): (&Handle, &Handle),
    y_gradient: &Handle,
    (x_gradient, wb_gradient): (&Handle, &Handle),
    eps: f32,
    rows: usize,
    columns: usize,
) -> Result<(), PointwiseError> {
    check("columns", columns, 8, LONGEST)?;
    let width = columns / 8;
    let cubes = rows.min(PARTS);
    let parts = client.empty(8 * cubes * columns);
    let (x, w) = (buffer("x", x, rows * width, 16)?, buffer("w", w, width, 16)?);
    let y_gradient = buffer("y_gradient", y_gradient, rows * width, 16)?;
    let x_gradient = buffer("x_gradient", x_gradient, rows * width, 16)?;
    let written = buffer("parts", &parts, 2 * cubes * columns, 4)?;
    buffer("wb_gradient", wb_gradient, 2 * columns, 4)?;
    // SAFETY: every cube stays in its rows, and the buffers hold all rows.
    unsafe {
        layer_norm_backward::launch_unchecked::<E>(
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
    sum_parts(client, &parts, wb_gradient, cubes, 2 * columns)
}
