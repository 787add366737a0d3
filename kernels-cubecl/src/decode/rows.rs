//! Which rows a cube of a grouped layer has. It is read on the device.

use cubecl::prelude::*;

use super::Rows;
use crate::pointwise::{CubeShape, cube_sums};

/// The cube's group, its first row and the one after its last. With fewer rows than groups there is a cube for each row,
/// which has the row's group if it is the first of it.
#[cube]
pub(super) fn rows_of_cube(
    slots: &[i32],
    groups: u32,
    all: u32,
    #[comptime] of: Rows,
    #[comptime] cube: CubeShape,
) -> (u32, u32, u32) {
    let mut group = CUBE_POS_Y;
    let mut first = 0u32;
    let mut end = all;
    if comptime![of != Rows::All] {
        if all < groups {
            group = u32::cast_from(slots[CUBE_POS_Y as usize]) % groups;
        }
        let mut scratch = Shared::<[f32]>::new_slice(comptime![cube.scratch()]);
        let mut before = 0.0f32;
        let mut here = 0.0f32;
        let mut i = UNIT_POS;
        while i < all {
            let other = u32::cast_from(slots[i as usize]) % groups;
            before += select(other < group, 1.0f32, 0.0f32);
            here += select(other == group, 1.0f32, 0.0f32);
            i += CUBE_DIM_X;
        }
        let (before, here) = cube_sums(before, here, &mut scratch, 0, cube);
        first = u32::cast_from(before);
        end = first + u32::cast_from(here);
        if all < groups && first != CUBE_POS_Y {
            end = first;
        }
    }
    (group, first, end)
}

/// The row of `x` that a row is.
#[cube]
pub(super) fn source(slots: &[i32], groups: u32, row: u32, #[comptime] of: Rows) -> u32 {
    let mut source = row;
    if comptime![of == Rows::Gathered] {
        source = u32::cast_from(slots[row as usize]) / groups;
    }
    source
}
