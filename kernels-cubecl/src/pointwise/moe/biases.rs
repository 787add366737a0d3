//! Biases of experts: every row of tokens has that of its group, times a factor. Their own gradients are
//! [`group_sums`](crate::pointwise::column_sum::group_sums).
use crate::pointwise::cube::plane_total;
use crate::pointwise::{CubeShape, MOST, PointwiseError, Vec8, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Most columns of a bias.
const LONGEST: usize = 1 << 25;

/// Biases of groups, and the groups of the rows.
#[derive(Clone, Copy, Debug)]
pub struct GroupBias<'a> {
    /// `[groups, columns]`.
    pub values: &'a Handle,
    /// Number of groups.
    pub groups: usize,
    /// The group of each block of rows, `i32`.
    pub of_blocks: &'a Handle,
    /// Rows of a block.
    pub block: usize,
}

impl GroupBias<'_> {
    /// The bias, the rows' groups and the rows of a block as arguments, and whether there are such; if not, other buffers
    /// take their place.
    pub(super) fn args<E: Float>(
        bias: Option<Self>,
        [wide, narrow]: [&Handle; 2],
        rows: usize,
        columns: usize,
    ) -> Result<(BufferArg, BufferArg, u32, bool), PointwiseError> {
        let bytes = 8 * size_of::<E>();
        match bias {
            Some(Self { values, groups, of_blocks, block }) => {
                check("rows of a block", block, 1, MOST)?;
                let values = buffer("bias", values, groups * columns / 8, bytes)?;
                let of_blocks = buffer("groups of rows", of_blocks, rows.div_ceil(block), 4)?;
                Ok((values, of_blocks, block as u32, true))
            }
            None => Ok((buffer("x", wide, 1, bytes)?, buffer("factors", narrow, 1, 4)?, 1, false)),
        }
    }
}

/// Cube `(row, vectors)`.
#[cube(launch_unchecked)]
pub fn add_biases<E: Float>(
    y: &mut [Vec8<E>],
    bias: &[Vec8<E>],
    groups: &[i32],
    factors: &[f32],
    width: u32,
    block: u32,
) {
    let column = CUBE_POS_Y * CUBE_DIM_X + UNIT_POS;
    if column < width {
        let at = (CUBE_POS_X * width + column) as usize;
        let value = y[at];
        let factor = factors[CUBE_POS_X as usize];
        let own = bias[(groups[(CUBE_POS_X / block) as usize] as u32 * width + column) as usize];
        let mut result = Vec8::<E>::empty();
        #[unroll]
        for i in 0..8usize {
            let sum = f32::cast_from(value.extract(i)) + f32::cast_from(own.extract(i)) * factor;
            result.insert(i, E::cast_from(sum));
        }
        y[at] = result;
    }
}

/// A plane takes a row.
#[cube(launch_unchecked)]
pub fn add_bias_products<E: Float>(
    gradient: &[Vec8<E>],
    bias: &[Vec8<E>],
    groups: &[i32],
    sums: &mut [f32],
    width: u32,
    rows: u32,
    block: u32,
    #[comptime] cube: CubeShape,
) {
    let row = CUBE_POS_X * comptime![cube.planes() as u32] + UNIT_POS / comptime![cube.plane];
    let lane = UNIT_POS % comptime![cube.plane];
    if row < rows {
        let own = groups[(row / block) as usize] as u32 * width;
        let mut total = 0.0f32;
        let mut column = lane;
        while column < width {
            let slope = gradient[(row * width + column) as usize];
            let value = bias[(own + column) as usize];
            #[unroll]
            for i in 0..8usize {
                total += f32::cast_from(slope.extract(i)) * f32::cast_from(value.extract(i));
            }
            column += comptime![cube.plane];
        }
        let total = plane_total(total, cube);
        if lane == 0 {
            sums[row as usize] = sums[row as usize] + total;
        }
    }
}

/// Whether there are kernels for rows of this length.
pub fn has_kernel(rows: usize, columns: usize) -> bool {
    check("columns", columns, 8, LONGEST).is_ok() && rows > 0 && rows <= MOST / (columns / 8)
}

/// Adds to each row of `y [rows, columns]`, of type `E` (2 bytes), its bias times its factor, of `factors [rows]` of
/// fp32.
///
/// # Errors
/// If a buffer is too short, or a row no multiple of 8.
pub fn add<E: Float>(
    client: &Client,
    y: &Handle,
    factors: &Handle,
    bias: GroupBias,
    rows: usize,
    columns: usize,
) -> Result<(), PointwiseError> {
    check("columns", columns, 8, LONGEST)?;
    let (cube, width) = (CubeShape::of(client).fitting(columns / 8), columns / 8);
    let (bias, groups, block, _) = GroupBias::args::<E>(Some(bias), [y, factors], rows, columns)?;
    let (y, factors) = (buffer("y", y, rows * width, 8 * size_of::<E>())?, buffer("factors", factors, rows, 4)?);
    // SAFETY: every unit stays in its row, and the buffers hold all rows.
    unsafe {
        launch_kernel!(add_biases<E>, client, cube.rows(rows, width), cube.dim();
            y, bias, groups, factors; width as u32, block)
    };
    Ok(())
}

/// Adds to `sums [rows]`, fp32, the gradient of each factor in [`add`], given that of `y`: the product of the gradient
/// and the row's bias.
///
/// # Errors
/// As [`add`].
pub fn add_products<E: Float>(
    client: &Client,
    gradient: &Handle,
    sums: &Handle,
    bias: GroupBias,
    rows: usize,
    columns: usize,
) -> Result<(), PointwiseError> {
    check("columns", columns, 8, LONGEST)?;
    check("rows", rows, 1, MOST)?;
    let (cube, width) = (CubeShape::of(client), columns / 8);
    let (bias, groups, block, _) = GroupBias::args::<E>(Some(bias), [gradient, sums], rows, columns)?;
    let (gradient, sums) =
        (buffer("gradient", gradient, rows * width, 8 * size_of::<E>())?, buffer("sums", sums, rows, 4)?);
    // SAFETY: every unit stays in its row, and the buffers hold all rows.
    unsafe {
        launch_kernel!(add_bias_products<E>, client,
            CubeCount::Static((rows as u32).div_ceil(cube.planes() as u32), 1, 1), cube.dim();
            gradient, bias, groups, sums; width as u32, rows as u32, block; cube)
    };
    Ok(())
}
