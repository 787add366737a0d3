//! The local part of a vocabulary-parallel cross-entropy. Columns from `valid` on are padding.

mod kernels;

pub use kernels::{gradient, row_maximum, row_sums};

use super::{CubeShape, PointwiseError, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Longest row.
const LONGEST: usize = 1 << 24;

/// The logits of a rank: `[rows, columns]`, column 0 has id `first_row`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogitsShape {
    /// Tokens.
    pub rows: usize,
    /// Columns, padding included; a multiple of 8.
    pub columns: usize,
    /// Columns before the padding.
    pub valid: usize,
    /// Id of column 0.
    pub first_row: usize,
}

impl LogitsShape {
    /// Whether there are kernels for this shape.
    pub fn has_kernel(&self) -> bool {
        self.check().is_ok()
    }

    fn check(&self) -> Result<(), PointwiseError> {
        check("columns", self.columns, 8, LONGEST)?;
        check("rows", self.rows, 1, i32::MAX as usize / (self.columns / 8))?;
        check("valid + 1", self.valid + 1, 1, self.columns + 1)?;
        check("first_row + 1", self.first_row + 1, 1, i32::MAX as usize)
    }

    /// Vectors of a row.
    fn width(&self) -> usize {
        self.columns / 8
    }

    /// Vectors of all rows.
    fn vectors(&self) -> usize {
        self.rows * self.width()
    }

    fn cubes(&self) -> CubeCount {
        CubeCount::Static(self.rows as u32, 1, 1)
    }
}

/// The greatest valid logit of each row, fp32 `[rows]`; −1e30 where there is none. Logits are of type `E` (2 bytes).
pub fn maximum<E: Float>(
    client: &Client,
    logits: &Handle,
    greatest: &Handle,
    shape: LogitsShape,
) -> Result<(), PointwiseError> {
    shape.check()?;
    let logits = buffer("logits", logits, shape.vectors(), 8 * size_of::<E>())?;
    let greatest = buffer("greatest", greatest, shape.rows, 4)?;
    let cube = CubeShape::of(client);
    let (width, valid) = (shape.width() as u32, shape.valid as u32);
    // SAFETY: every cube stays in its row, and the buffers hold all rows.
    unsafe {
        row_maximum::launch_unchecked::<E>(client, shape.cubes(), cube.dim(), logits, greatest, width, valid, cube)
    };
    Ok(())
}

/// `Σ exp(logit − greatest)` over the valid columns, and the label's `logit − greatest` (0 if another rank has it),
/// fp32 `[2, rows]`; labels are `i32`. With `find` the rows' maxima are found in the same pass, else they are in
/// `greatest`.
pub fn sums<E: Float>(
    client: &Client,
    logits: &Handle,
    labels: &Handle,
    (greatest, out): (&Handle, &Handle),
    shape: LogitsShape,
    find: bool,
) -> Result<(), PointwiseError> {
    shape.check()?;
    let logits = buffer("logits", logits, shape.vectors(), 8 * size_of::<E>())?;
    let greatest = buffer("greatest", greatest, shape.rows, 4)?;
    let (labels, out) = (buffer("labels", labels, shape.rows, 4)?, buffer("out", out, 2 * shape.rows, 4)?);
    let cube = CubeShape::of(client);
    // SAFETY: every cube stays in its row, and the buffers hold all rows.
    unsafe {
        launch_kernel!(row_sums<E>, client, shape.cubes(), cube.dim();
            logits, labels, greatest, out; shape.width() as u32, shape.valid as u32, shape.first_row as i32; find, cube)
    };
    Ok(())
}

/// The gradient of the logits, given the log-sum-exp over the whole vocabulary and the gradient of the loss, fp32
/// `[rows]` each. Without `out` it overwrites the logits.
pub fn logits_gradient<E: Float>(
    client: &Client,
    logits: &Handle,
    (lse, dloss): (&Handle, &Handle),
    labels: &Handle,
    out: Option<&Handle>,
    shape: LogitsShape,
) -> Result<(), PointwiseError> {
    shape.check()?;
    let vectors = shape.vectors();
    let out = match out {
        Some(out) => buffer("out", out, vectors, 8 * size_of::<E>())?,
        None => BufferArg::alias(0, vectors),
    };
    let logits = buffer("logits", logits, vectors, 8 * size_of::<E>())?;
    let (lse, dloss) = (buffer("lse", lse, shape.rows, 4)?, buffer("the gradient of the loss", dloss, shape.rows, 4)?);
    let labels = buffer("labels", labels, shape.rows, 4)?;
    let cube = CubeShape::of(client);
    let (width, valid) = (shape.width() as u32, shape.valid as u32);
    // SAFETY: every unit stays in its row and reads each vector before it overwrites it, and the buffers hold all rows.
    unsafe {
        launch_kernel!(gradient<E>, client, cube.rows(shape.rows, shape.width()), cube.dim();
            logits, lse, labels, dloss, out; width, valid, shape.first_row as i32)
    };
    Ok(())
}
