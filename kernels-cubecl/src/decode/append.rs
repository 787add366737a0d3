//! Writes the keys and values of the new tokens to their pages.
#![allow(missing_docs, reason = "the launch macros write public items without documentation")]

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::DecodeShape;
use crate::pointwise::{CubeShape, PointwiseError, Vec8, buffer};

/// A unit for each vector of a new key, and of a new value after it.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn append_rows<E: Float>(
    qkv: &[Vec8<E>],
    keys: &mut [Vec8<E>],
    values: &mut [Vec8<E>],
    table: &[i32],
    lengths: &[i32],
    sequences: u32,
    heads: u32,
    kv_heads: u32,
    max_blocks: u32,
    #[comptime] vectors: u32,
    #[comptime] block_size: u32,
) {
    let of_sequence = 2 * kv_heads * vectors;
    let item = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    let sequence = item / of_sequence;
    if sequence < sequences {
        let length = lengths[sequence as usize];
        if length > 0 {
            let position = u32::cast_from(length) - 1;
            let page = u32::cast_from(table[(sequence * max_blocks + position / block_size) as usize]);
            let row = page * block_size + position % block_size;
            let nth = item % of_sequence;
            let new = qkv[((sequence * (heads + 2 * kv_heads) + heads) * vectors + nth) as usize];
            let of_keys = kv_heads * vectors;
            if nth < of_keys {
                keys[(row * of_keys + nth) as usize] = new;
            } else {
                values[(row * of_keys + nth - of_keys) as usize] = new;
            }
        }
    }
}

/// Writes the keys and values of the packed projection `qkv [sequences, heads + 2 kv_heads, head_dim]` to `keys` and
/// `values` at position `length - 1` of each sequence, of type `E` (2 bytes or fp32) without gaps. `table` and `lengths`
/// are `i32 [sequences, max_blocks]` and `i32 [sequences]`; a sequence of length 0 is left out. The caller has checked
/// that the table names pages of the cache.
///
/// # Errors
/// If there is no kernel for the shape, or a buffer is too small.
pub fn append<E: Float>(
    client: &Client,
    shape: DecodeShape,
    qkv: &Handle,
    [keys, values]: [&Handle; 2],
    [table, lengths]: [&Handle; 2],
) -> Result<(), PointwiseError> {
    shape.refused()?;
    let bytes = 8 * size_of::<E>();
    let items = shape.sequences * 2 * shape.kv_heads * shape.vectors();
    let cube = CubeShape::of(client);
    // SAFETY: units past the last vector do nothing, the others stay in their sequence and in its page.
    unsafe {
        append_rows::launch_unchecked::<E>(
            client,
            cube.line(items),
            cube.dim(),
            buffer("qkv", qkv, shape.packed(), bytes)?,
            buffer("keys", keys, shape.paged(), bytes)?,
            buffer("values", values, shape.paged(), bytes)?,
            buffer("table", table, shape.sequences * shape.max_blocks, 4)?,
            buffer("lengths", lengths, shape.sequences, 4)?,
            shape.sequences as u32,
            shape.heads as u32,
            shape.kv_heads as u32,
            shape.max_blocks as u32,
            shape.vectors() as u32,
            shape.block_size as u32,
        )
    };
    Ok(())
}
