//! The biases of groups of rows: tables of which block of rows has which, and their addition.

use burn::backend::{Cube, TensorMetadata};
use cubecl::server::Handle;
use kernels_cubecl::grouped::tiles::ROWS;
use kernels_cubecl::pointwise::moe::biases::{self, GroupBias};

use super::{Float, columns, launched, rows, work};
use crate::moe;

/// `y + bias p`, of the kernels' types.
pub fn add_weighted_bias(y: Float, [bias, p]: [&Float; 2], counts: &[usize]) -> Float {
    let (count, width) = (rows(&y), columns(&y));
    if !biases::has_kernel(count, width) {
        return moe::add_weighted_bias::<Cube>(y, bias.clone(), p.clone(), counts);
    }
    let _noted = work::memory("biases of experts", &y, |bytes| 2 * bytes);
    let blocks = Blocks::new(&y, counts);
    let done = by_half!(y, E => biases::add::<E>(&y.client, &y.handle, &p.handle, blocks.with(bias), count, width));
    launched("biases of experts", done);
    y
}

/// Numbers on the device of `near`, as `i32`.
pub fn upload(near: &Float, numbers: impl Iterator<Item = usize>) -> Handle {
    near.client.create_from_slice(&numbers.flat_map(|number| (number as i32).to_ne_bytes()).collect::<Vec<_>>())
}

/// The groups of blocks of rows.
pub struct Blocks {
    table: Handle,
    rows: usize,
    groups: usize,
}

impl Blocks {
    pub fn new(near: &Float, counts: &[usize]) -> Self {
        // The host lists blocks as large as the grouped GEMM's tiles many times as fast as rows.
        let rows = if counts.iter().all(|count| count.is_multiple_of(ROWS)) { ROWS } else { 1 };
        let blocks = |(group, count): (usize, &usize)| std::iter::repeat_n(group, *count / rows);
        Self { table: upload(near, counts.iter().enumerate().flat_map(blocks)), rows, groups: counts.len() }
    }

    pub fn with<'a>(&'a self, bias: &'a Float) -> GroupBias<'a> {
        GroupBias { values: &bias.handle, groups: self.groups, of_blocks: &self.table, block: self.rows }
    }
}
