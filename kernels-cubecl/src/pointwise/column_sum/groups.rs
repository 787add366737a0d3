//! Sums over the rows of each group: the gradients of experts' biases.
use super::{MOST, Slicing, Sums, sum_slices};
use crate::pointwise::{PointwiseError, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Rows of groups, one group after the other.
#[derive(Clone, Copy, Debug)]
pub struct GroupRows<'a> {
    /// First rows of the groups and the end of the last, ascending: `i32 [groups + 1]`.
    pub starts: &'a Handle,
    /// Number of groups.
    pub groups: usize,
    /// Rows of all groups.
    pub rows: usize,
}

/// `total[g, c] = Σ x[r, c]` over the rows `r` of group `g`, times `factors[r]` if there are such: fp32 `[groups,
/// columns]` of `x [rows, columns]` of type `E`. A group without rows gets zeros. Deterministic.
///
/// # Errors
/// As [`column_sum`].
pub fn group_sums<E: Float>(
    client: &Client,
    x: &Handle,
    factors: Option<&Handle>,
    total: &Handle,
    groups: GroupRows,
    columns: usize,
) -> Result<(), PointwiseError> {
    let GroupRows { starts, groups, rows } = groups;
    check("rows", rows, 1, MOST)?;
    check("columns", columns, 8, MOST / rows)?;
    check("groups", groups, 1, u16::MAX as usize)?;
    let width = columns / 8;
    // A cube adds up a group: their number saturates the memory.
    let slicing = Slicing { slices: 1, ..Slicing::of(client, rows, columns) };
    let sums = if factors.is_some() { Sums::WeightedGroups } else { Sums::Groups };
    let from = buffer("x", x, rows * width, 8 * size_of::<E>())?;
    let factors = match factors {
        Some(factors) => buffer("factors", factors, rows, 4)?,
        None => buffer("total", total, 1, 4)?,
    };
    let (starts, written) = (buffer("starts", starts, groups + 1, 4)?, buffer("total", total, groups * columns, 4)?);
    // SAFETY: units past the last column or row add nothing, the buffers hold all of both, and the starts are of rows
    // as the caller guarantees.
    unsafe {
        launch_kernel!(sum_slices<E>, client,
            CubeCount::Static((width as u32).div_ceil(slicing.side), groups as u32, 1), CubeDim::new_1d(slicing.units);
            from, factors, starts, written; rows as u32, width as u32; sums, slicing)
    };
    Ok(())
}
