//! Rows of a table by id, and their gradient.
pub mod gradient;
mod list;
mod plan;

use super::{CubeShape, PointwiseError, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;
pub use gradient::{backward, backward_planned};
pub use plan::Plan;

/// Longest row of a table, in vectors.
const LONGEST: usize = 1 << 20;

/// Tokens of a unit.
const TOKENS: u32 = 4;

/// 16 bytes of anything.
type Bits = Vector<u32, Const<4>>;

/// A table of `rows` rows, the first with id `first_row`, and the number of tokens to look up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableShape {
    /// Rows of the table.
    pub rows: usize,
    /// Length of a row.
    pub hidden: usize,
    /// Id of row 0.
    pub first_row: usize,
    /// Tokens.
    pub ids: usize,
}

impl TableShape {
    /// Whether there are kernels for this shape and numbers of `bytes` bytes.
    pub fn has_kernel(&self, bytes: usize) -> bool {
        self.check().is_ok() && (self.hidden * bytes).is_multiple_of(16)
    }

    fn check(&self) -> Result<(), PointwiseError> {
        check("hidden", self.hidden, 8, 8 * LONGEST)?;
        check("ids", self.ids, 1, i32::MAX as usize / (self.hidden / 2))?;
        check("rows", self.rows, 1, i32::MAX as usize / (self.hidden / 2))?;
        check("first_row + 1", self.first_row + 1, 1, i32::MAX as usize)
    }
}

/// Cube `(tokens, vectors)`.
#[cube(launch_unchecked)]
pub fn gather(table: &[Bits], ids: &[i32], out: &mut [Bits], tokens: u32, width: u32, rows: u32, first_row: i32) {
    let column = CUBE_POS_Y * CUBE_DIM_X + UNIT_POS;
    let first = CUBE_POS_X * TOKENS;
    if column < width {
        let mut token = Array::<u32>::new(comptime![TOKENS as usize]);
        let mut from = Array::<u32>::new(comptime![TOKENS as usize]);
        let mut held = Array::<Bits>::new(comptime![TOKENS as usize]);
        // All rows are loaded before the first is written; no load depends on a condition. Past the last token its row
        // is written again, and ids outside the table read the last row.
        #[unroll]
        for k in 0..comptime![TOKENS as usize] {
            token[k] = min(first + comptime![k as u32], tokens - 1);
            // An id before the table wraps around to a row past it.
            from[k] = (ids[token[k] as usize] - first_row) as u32;
        }
        #[unroll]
        for k in 0..comptime![TOKENS as usize] {
            held[k] = table[(min(from[k], rows - 1) * width + column) as usize];
        }
        #[unroll]
        for k in 0..comptime![TOKENS as usize] {
            let mut value = held[k];
            if from[k] >= rows {
                value = Bits::new(0u32);
            }
            out[(token[k] * width + column) as usize] = value;
        }
    }
}

/// `out [ids, hidden]` from `table [rows, hidden]`, numbers of `bytes` bytes without gaps; zero for an id outside. Ids
/// are `i32`.
pub fn forward(
    client: &Client,
    table: &Handle,
    ids: &Handle,
    out: &Handle,
    shape: TableShape,
    bytes: usize,
) -> Result<(), PointwiseError> {
    shape.check()?;
    check("bytes of a row", shape.hidden * bytes, 16, 16 * LONGEST)?;
    let width = shape.hidden * bytes / 16;
    let cube = CubeShape::of(client).fitting(width);
    let (table, ids) = (buffer("table", table, shape.rows * width, 16)?, buffer("ids", ids, shape.ids, 4)?);
    let out = buffer("out", out, shape.ids * width, 16)?;
    // SAFETY: rows are in the table, every unit stays in its row, and the buffers hold all rows.
    unsafe {
        launch_kernel!(gather, client, cube.rows(shape.ids.div_ceil(TOKENS as usize), width), cube.dim();
            table, ids, out; shape.ids as u32, width as u32, shape.rows as u32, shape.first_row as i32)
    };
    Ok(())
}
