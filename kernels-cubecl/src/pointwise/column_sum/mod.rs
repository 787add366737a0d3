//! Sums over all rows of a matrix in fp32, or over those of each group: the gradient of a bias.
mod groups;

use super::partial_sums::sum_partials;
use super::{CubeShape, PointwiseError, Vec8, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;
pub use groups::{GroupRows, group_sums};

/// Most elements, for 32-bit positions.
const MOST: usize = 8 * i32::MAX as usize;
/// Fewest rows of a slice for each unit that shares them.
const ROWS_EACH: usize = 4;

/// How the matrix is split among cubes. [`Slicing::of`] is the best one known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slicing {
    /// Units of a cube.
    pub units: u32,
    /// Neighbouring units, of eight columns each.
    pub side: u32,
    /// Cubes that share the rows of a column. The sums of a single one need no second pass.
    pub slices: u32,
    /// Loads of a unit in flight.
    pub in_flight: u32,
}

impl Slicing {
    /// The slicing on this client's device.
    pub fn of(client: &Client, rows: usize, columns: usize) -> Self {
        let sms = client.properties().hardware.num_streaming_multiprocessors.unwrap_or(2);
        Self::on(CubeShape::of(client), sms as usize, rows, columns / 8)
    }

    fn on(cube: CubeShape, sms: usize, rows: usize, width: usize) -> Self {
        let (units, side) = if cube.plane == 1 { (cube.units, 1) } else { (2 * cube.units, 4) };
        let across = width.div_ceil(side as usize);
        // As many cubes as three quarters of the SMs saturate the memory.
        let wanted = if 4 * across >= 3 * sms { 1 } else { (2 * sms).div_ceil(across) };
        let most = rows.div_ceil(ROWS_EACH * (units / side) as usize);
        Self { units, side, slices: wanted.min(most) as u32, in_flight: 5 }
    }

    /// Units with the same columns.
    fn lanes(self) -> u32 {
        self.units / self.side
    }

    /// Columns of a cube.
    fn columns(self) -> u32 {
        8 * self.side
    }

    /// Runs in which a column's lanes are summed first.
    fn runs(self) -> u32 {
        (self.units / self.columns()).max(1)
    }

    /// Distance of a unit's sums in shared memory, so that they lie in different banks.
    fn pitch(self) -> u32 {
        self.units + self.side
    }

    fn scratch(self) -> usize {
        (8 * self.pitch() + self.runs() * self.columns()) as usize
    }
}

/// A vector of a row, zeros past the last.
#[cube]
fn row_or_zeros<E: Float>(x: &[Vec8<E>], row: u32, rows: u32, column: u32, width: u32) -> Vec8<E> {
    let mut value = Vec8::<E>::new(E::new(0.0));
    if row < rows {
        value = x[(row * width + column) as usize];
    }
    value
}

/// The number of a row, zero past the last.
#[cube]
fn number_or_zero(x: &[f32], row: u32, rows: u32) -> f32 {
    let mut value = 0.0f32;
    if row < rows {
        value = x[row as usize];
    }
    value
}

/// What the sums of [`sum_slices`] are over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sums {
    /// All rows.
    Rows,
    /// The rows of each group.
    Groups,
    /// The same, each row times its factor.
    WeightedGroups,
}

/// Cube `(columns, slice)` or `(columns, group)`. Every unit takes every n-th row; the cube writes its sums to the
/// slice's row of `partials`. `starts` are the first rows of the groups, and the end of the last.
#[cube(launch_unchecked)]
pub fn sum_slices<E: Float>(
    x: &[Vec8<E>],
    factors: &[f32],
    starts: &[i32],
    partials: &mut [f32],
    rows: u32,
    width: u32,
    #[comptime] sums: Sums,
    #[comptime] slicing: Slicing,
) {
    let mut scratch = Shared::<[f32]>::new_slice(comptime![slicing.scratch()]);
    let (side, lanes) = comptime![(slicing.side, slicing.lanes())];
    let column = CUBE_POS_X * side + UNIT_POS % side;
    let mut first = CUBE_POS_Y * lanes;
    let mut stride = CUBE_COUNT_Y * lanes;
    let mut end = rows;
    if comptime![sums != Sums::Rows] {
        first = starts[CUBE_POS_Y as usize] as u32;
        stride = lanes.runtime();
        end = starts[CUBE_POS_Y as usize + 1] as u32;
    }
    let mut sum = Array::<f32>::new(8usize);
    #[unroll]
    for i in 0..8usize {
        sum[i] = 0.0;
    }
    if column < width {
        let mut row = first + UNIT_POS / side;
        // A ring: a place is filled again as soon as it was added, so equally many loads are always in flight. Of
        // independent loads ptxas keeps only two or three in flight to save registers, which gave 66 % of the bandwidth
        // of a copy; a ring that is carried over the iterations of a loop keeps them all.
        let mut in_flight = Array::<Vec8<E>>::new(comptime![slicing.in_flight as usize]);
        let mut weights = Array::<f32>::new(comptime![slicing.in_flight as usize]);
        #[unroll]
        for k in 0..comptime![slicing.in_flight as usize] {
            let own = row + comptime![k as u32] * stride;
            in_flight[k] = row_or_zeros::<E>(x, own, end, column, width);
            if comptime![sums == Sums::WeightedGroups] {
                weights[k] = number_or_zero(factors, own, end);
            }
        }
        while row < end {
            #[unroll]
            for k in 0..comptime![slicing.in_flight as usize] {
                #[unroll]
                for i in 0..8usize {
                    let mut value = f32::cast_from(in_flight[k].extract(i));
                    if comptime![sums == Sums::WeightedGroups] {
                        value = value * weights[k];
                    }
                    sum[i] = sum[i] + value;
                }
                let next = row + comptime![slicing.in_flight + k as u32] * stride;
                in_flight[k] = row_or_zeros::<E>(x, next, end, column, width);
                if comptime![sums == Sums::WeightedGroups] {
                    weights[k] = number_or_zero(factors, next, end);
                }
            }
            row += comptime![slicing.in_flight] * stride;
        }
    }
    let pitch = comptime![slicing.pitch()];
    #[unroll]
    for i in 0..8usize {
        scratch[(comptime![i as u32 * pitch] + UNIT_POS) as usize] = sum[i];
    }
    sync_cube();
    // A column is an element of the vector of one of the neighbouring units.
    let (columns, runs) = comptime![(slicing.columns(), slicing.runs())];
    let behind = comptime![8 * pitch];
    let mut task = UNIT_POS;
    while task < comptime![columns * runs] {
        let (own, run) = (task % columns, task / columns);
        let at = own / side * pitch + own % side;
        let mut total = 0.0f32;
        #[unroll]
        for k in 0..comptime![lanes / runs] {
            total += scratch[(at + (run * comptime![lanes / runs] + comptime![k]) * side) as usize];
        }
        scratch[(behind + task) as usize] = total;
        task += comptime![slicing.units];
    }
    sync_cube();
    let mut own = UNIT_POS;
    while own < columns {
        let column = CUBE_POS_X * side + own % side;
        if column < width {
            let mut total = 0.0f32;
            #[unroll]
            for k in 0..runs {
                total += scratch[(behind + own + comptime![k * columns]) as usize];
            }
            partials[((CUBE_POS_Y * width + column) * 8 + own / side) as usize] = total;
        }
        own += comptime![slicing.units];
    }
}

/// Whether there is a kernel for this many rows and columns.
pub fn has_kernel(rows: usize, columns: usize) -> bool {
    rows > 0 && check("columns", columns, 8, MOST / rows).is_ok()
}

/// `total[c] = Σ x[·, c]`, fp32 `[columns]`, of `x [rows, columns]` of type `E` (2 bytes) without gaps. Deterministic.
///
/// # Errors
/// If there is no kernel for the sizes, or a buffer is too short.
pub fn column_sum<E: Float>(
    client: &Client,
    x: &Handle,
    total: &Handle,
    rows: usize,
    columns: usize,
) -> Result<(), PointwiseError> {
    column_sum_sliced::<E>(client, x, total, rows, columns, Slicing::of(client, rows, columns))
}

/// [`column_sum`] with another slicing.
pub fn column_sum_sliced<E: Float>(
    client: &Client,
    x: &Handle,
    total: &Handle,
    rows: usize,
    columns: usize,
    slicing: Slicing,
) -> Result<(), PointwiseError> {
    check("rows", rows, 1, MOST)?;
    check("columns", columns, 8, MOST / rows)?;
    let (width, slices) = (columns / 8, slicing.slices as usize);
    let partials = if slices == 1 { total.clone() } else { client.empty(4 * slices * columns) };
    let (from, written) =
        (buffer("x", x, rows * width, 8 * size_of::<E>())?, buffer("parts", &partials, slices * columns, 4)?);
    let unread = || buffer("total", total, columns, 4);
    // SAFETY: units past the last column or row add nothing, and the buffers hold all of both.
    unsafe {
        launch_kernel!(sum_slices<E>, client,
            CubeCount::Static((width as u32).div_ceil(slicing.side), slicing.slices, 1), CubeDim::new_1d(slicing.units);
            from, unread()?, unread()?, written; rows as u32, width as u32; Sums::Rows, slicing)
    };
    if slices == 1 { Ok(()) } else { sum_partials(client, &partials, total, slices, columns) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_fill_a_card_and_are_never_empty() {
        // Rows, and vectors of a row: a layer of GPT-3 on one rank, Llama 3 8B, narrow, one row, wide.
        for (rows, width, slices) in [(8192, 1536, 1), (8192, 512, 1), (16384, 16, 32), (1, 8, 1), (7, 1 << 20, 1)] {
            let found = Slicing::on(CubeShape::GPU, 132, rows, width);
            assert_eq!(found.slices, slices, "{rows} × {width}");
            assert!(found.slices as usize <= rows && found.lanes().is_multiple_of(found.runs()));
        }
    }

    #[test]
    fn rows_that_do_not_fill_vectors_have_no_kernel() {
        assert!(has_kernel(39, 512));
        assert!(!has_kernel(39, 37) && !has_kernel(0, 512) && !has_kernel(MOST / 8, 512));
    }
}
