//! RMSNorm, `y = w x / √(mean(x²) + eps)`, and LayerNorm, `y = w (x − mean) / √(var + eps) + b`, over rows, and their
//! gradients. The variance is that of the centred row: taken from the mean of squares it would lose the digits that the
//! mean has.
use super::cube::cube_sums;
use super::parts::{PARTS, sum_parts};
use super::{CubeShape, PointwiseError, Vec8, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// The weights of a normalisation, `[columns]` each, which say of which kind it is.
#[derive(Clone, Copy, Debug)]
pub enum Affine<'a> {
    /// RMSNorm with its weight.
    Rms(&'a Handle),
    /// LayerNorm with its weight and bias.
    Layer(&'a Handle, &'a Handle),
}

impl<'a> Affine<'a> {
    fn weight(self) -> &'a Handle {
        let (Self::Rms(w) | Self::Layer(w, _)) = self;
        w
    }

    fn centred(self) -> bool {
        matches!(self, Self::Layer(..))
    }

    /// Longest row: what a cube's registers hold in the backward pass.
    fn longest(self) -> usize {
        if self.centred() { 8192 } else { 16384 }
    }

    /// Whether there is a kernel for rows of this length.
    pub fn has_kernel(self, columns: usize) -> bool {
        check("columns", columns, 8, self.longest()).is_ok()
    }
}

/// Rows and their length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NormShape {
    /// Rows.
    pub rows: usize,
    /// Numbers in a row.
    pub columns: usize,
}

/// This unit's vectors of a row, if there is such a row.
#[cube]
fn read_row<E: Float>(
    from: &[Vec8<E>],
    to: &mut Array<Vec8<E>>,
    row: u32,
    rows: u32,
    width: u32,
    #[comptime] vectors: usize,
) {
    #[unroll]
    for v in 0..vectors {
        let column = UNIT_POS + comptime![v as u32] * CUBE_DIM_X;
        if row < rows && column < width {
            to[v] = from[(row * width + column) as usize];
        }
    }
}

/// A cube takes a row. Without `centred` there is no mean and no `b`.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn norm_forward<E: Float>(
    x: &[Vec8<E>],
    w: &[Vec8<E>],
    b: &[Vec8<E>],
    y: &mut [Vec8<E>],
    eps: f32,
    width: u32,
    #[comptime] vectors: usize,
    #[comptime] centred: bool,
    #[comptime] cube: CubeShape,
) {
    let mut scratch = Shared::<[f32]>::new_slice(comptime![cube.scratch()]);
    let columns = (width * 8) as f32;
    let mut held = Array::<Vec8<E>>::new(vectors);
    read_row(x, &mut held, CUBE_POS_X, CUBE_COUNT_X, width, vectors);
    let mut mean = 0.0f32;
    if comptime![centred] {
        let mut sum = 0.0f32;
        #[unroll]
        for v in 0..vectors {
            if UNIT_POS + comptime![v as u32] * CUBE_DIM_X < width {
                let value = held[v];
                #[unroll]
                for i in 0..8usize {
                    sum += f32::cast_from(value.extract(i));
                }
            }
        }
        let (sum, _) = cube_sums(sum, 0.0, &mut scratch, 0u32, cube);
        mean = sum / columns;
    }
    let mut squares = 0.0f32;
    #[unroll]
    for v in 0..vectors {
        if UNIT_POS + comptime![v as u32] * CUBE_DIM_X < width {
            let value = held[v];
            #[unroll]
            for i in 0..8usize {
                let away = f32::cast_from(value.extract(i)) - mean;
                squares += away * away;
            }
        }
    }
    let (squares, _) = cube_sums(squares, 0.0, &mut scratch, 1u32, cube);
    let factor = 1.0 / (squares / columns + eps).sqrt();
    #[unroll]
    for v in 0..vectors {
        let column = UNIT_POS + comptime![v as u32] * CUBE_DIM_X;
        if column < width {
            let (value, weight) = (held[v], w[column as usize]);
            let mut result = Vec8::<E>::empty();
            if comptime![centred] {
                result = b[column as usize];
            }
            #[unroll]
            for i in 0..8usize {
                let mut value = (f32::cast_from(value.extract(i)) - mean) * factor * f32::cast_from(weight.extract(i));
                if comptime![centred] {
                    value += f32::cast_from(result.extract(i));
                }
                result.insert(i, E::cast_from(value));
            }
            y[(CUBE_POS_X * width + column) as usize] = result;
        }
    }
}

/// Every cube takes every `CUBE_COUNT_X`th row and leaves its shares of the gradients of `w`, and behind them those of `b`,
/// in a row of `parts`.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn norm_backward<E: Float>(
    x: &[Vec8<E>],
    w: &[Vec8<E>],
    y_gradient: &[Vec8<E>],
    x_gradient: &mut [Vec8<E>],
    parts: &mut [f32],
    eps: f32,
    rows: u32,
    width: u32,
    #[comptime] vectors: usize,
    #[comptime] centred: bool,
    #[comptime] cube: CubeShape,
) {
    let mut scratch = Shared::<[f32]>::new_slice(comptime![cube.scratch()]);
    let columns = (width * 8) as f32;
    let biases = comptime![if centred { vectors * 8 } else { 0 }];
    let mut w_sum = Array::<f32>::new(comptime![vectors * 8]);
    let mut b_sum = Array::<f32>::new(comptime![biases.max(1)]);
    #[unroll]
    for i in 0..comptime![vectors * 8] {
        w_sum[i] = 0.0;
    }
    #[unroll]
    for i in 0..biases {
        b_sum[i] = 0.0;
    }
    let mut values = Array::<Vec8<E>>::new(vectors);
    let mut slopes = Array::<Vec8<E>>::new(vectors);
    read_row(x, &mut values, CUBE_POS_X, rows, width, vectors);
    read_row(y_gradient, &mut slopes, CUBE_POS_X, rows, width, vectors);
    let mut row = CUBE_POS_X;
    let mut turn = 0u32;
    while row < rows {
        let mut mean = 0.0f32;
        let mut slope_mean = 0.0f32;
        if comptime![centred] {
            let mut sum = 0.0f32;
            let mut slope_sum = 0.0f32;
            #[unroll]
            for v in 0..vectors {
                let column = UNIT_POS + comptime![v as u32] * CUBE_DIM_X;
                if column < width {
                    let (value, slope, weight) = (values[v], slopes[v], w[column as usize]);
                    #[unroll]
                    for i in 0..8usize {
                        sum += f32::cast_from(value.extract(i));
                        slope_sum += f32::cast_from(slope.extract(i)) * f32::cast_from(weight.extract(i));
                    }
                }
            }
            let (sum, slope_sum) = cube_sums(sum, slope_sum, &mut scratch, 0u32, cube);
            mean = sum / columns;
            slope_mean = slope_sum / columns;
            turn = 1u32;
        }
        let mut squares = 0.0f32;
        let mut product = 0.0f32;
        #[unroll]
        for v in 0..vectors {
            let column = UNIT_POS + comptime![v as u32] * CUBE_DIM_X;
            if column < width {
                let (value, slope, weight) = (values[v], slopes[v], w[column as usize]);
                #[unroll]
                for i in 0..8usize {
                    let away = f32::cast_from(value.extract(i)) - mean;
                    squares += away * away;
                    product += away * f32::cast_from(slope.extract(i)) * f32::cast_from(weight.extract(i));
                }
            }
        }
        // The next row is on its way while this one's sums are taken.
        let mut next_values = Array::<Vec8<E>>::new(vectors);
        let mut next_slopes = Array::<Vec8<E>>::new(vectors);
        read_row(x, &mut next_values, row + CUBE_COUNT_X, rows, width, vectors);
        read_row(y_gradient, &mut next_slopes, row + CUBE_COUNT_X, rows, width, vectors);
        let (squares, product) = cube_sums(squares, product, &mut scratch, turn, cube);
        turn = 1 - turn;
        let factor = 1.0 / (squares / columns + eps).sqrt();
        let along = product * factor * factor / columns;
        #[unroll]
        for v in 0..vectors {
            let column = UNIT_POS + comptime![v as u32] * CUBE_DIM_X;
            if column < width {
                let (value, slope, weight) = (values[v], slopes[v], w[column as usize]);
                let mut result = Vec8::<E>::empty();
                #[unroll]
                for i in 0..8usize {
                    let away = f32::cast_from(value.extract(i)) - mean;
                    let slope = f32::cast_from(slope.extract(i));
                    let weighted = slope * f32::cast_from(weight.extract(i));
                    result.insert(i, E::cast_from((weighted - slope_mean - away * along) * factor));
                    w_sum[comptime![v * 8 + i]] = w_sum[comptime![v * 8 + i]] + slope * away * factor;
                    if comptime![centred] {
                        b_sum[comptime![v * 8 + i]] = b_sum[comptime![v * 8 + i]] + slope;
                    }
                }
                x_gradient[(row * width + column) as usize] = result;
            }
            values[v] = next_values[v];
            slopes[v] = next_slopes[v];
        }
        row += CUBE_COUNT_X;
    }
    let kinds = comptime![if centred { 2u32 } else { 1 }];
    #[unroll]
    for v in 0..vectors {
        let column = UNIT_POS + comptime![v as u32] * CUBE_DIM_X;
        if column < width {
            let w_at = (CUBE_POS_X * kinds * width + column) * 8;
            #[unroll]
            for i in 0..8usize {
                parts[w_at as usize + i] = w_sum[comptime![v * 8 + i]];
                if comptime![centred] {
                    parts[(w_at + width * 8) as usize + i] = b_sum[comptime![v * 8 + i]];
                }
            }
        }
    }
}

/// `y [rows, columns]` from `x`, all of type `E` and without gaps; statistics in fp32.
///
/// # Errors
/// If there is no kernel for the row length, or a buffer is too short.
pub fn forward<E: Float>(
    client: &Client,
    x: &Handle,
    affine: Affine,
    y: &Handle,
    eps: f32,
    NormShape { rows, columns }: NormShape,
) -> Result<(), PointwiseError> {
    check("columns", columns, 8, affine.longest())?;
    let (cube, width, vector) = (CubeShape::of(client), columns / 8, 8 * size_of::<E>());
    let (x, w) = (buffer("x", x, rows * width, vector)?, buffer("w", affine.weight(), width, vector)?);
    // Without a bias the kernel gets the weight, which it does not read twice.
    let b = if let Affine::Layer(_, b) = affine { b } else { affine.weight() };
    let (b, y) = (buffer("b", b, width, vector)?, buffer("y", y, rows * width, vector)?);
    // SAFETY: every cube stays in its row, and the buffers hold all rows.
    unsafe {
        norm_forward::launch_unchecked::<E>(
            client,
            CubeCount::Static(rows as u32, 1, 1),
            cube.dim(),
            x,
            w,
            b,
            y,
            eps,
            width as u32,
            cube.share(width),
            affine.centred(),
            cube,
        )
    };
    Ok(())
}

/// The gradients of `x` (type `E`) and of the weight, behind it that of the bias (fp32 `[columns]` or `[2, columns]`), in
/// [`forward`], given that of `y`. Deterministic.
///
/// # Errors
/// As [`forward`].
pub fn backward<E: Float>(
    client: &Client,
    x: &Handle,
    affine: Affine,
    y_gradient: &Handle,
    (x_gradient, affine_gradient): (&Handle, &Handle),
    eps: f32,
    NormShape { rows, columns }: NormShape,
) -> Result<(), PointwiseError> {
    check("columns", columns, 8, affine.longest())?;
    let (cube, width, vector) = (CubeShape::of(client), columns / 8, 8 * size_of::<E>());
    let (cubes, sums) = (rows.min(PARTS), if affine.centred() { 2 * columns } else { columns });
    let parts = client.empty(4 * cubes * sums);
    let (x, w) = (buffer("x", x, rows * width, vector)?, buffer("w", affine.weight(), width, vector)?);
    let y_gradient = buffer("y_gradient", y_gradient, rows * width, vector)?;
    let x_gradient = buffer("x_gradient", x_gradient, rows * width, vector)?;
    let written = buffer("parts", &parts, cubes * sums, 4)?;
    buffer("affine_gradient", affine_gradient, sums, 4)?;
    // SAFETY: every cube stays in its rows, and the buffers hold all rows.
    unsafe {
        norm_backward::launch_unchecked::<E>(
            client,
            CubeCount::Static(cubes as u32, 1, 1),
            cube.dim(),
            x,
            w,
            y_gradient,
            x_gradient,
            written,
            eps,
            rows as u32,
            width as u32,
            cube.share(width),
            affine.centred(),
            cube,
        )
    };
    sum_parts(client, &parts, affine_gradient, cubes, sums)
}
