//! Rotates the queries and keys of the new tokens, and writes the keys and values to their pages.
#![allow(missing_docs, reason = "the launch macros write public items without documentation")]

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::DecodeShape;
use crate::pointwise::{CubeShape, PointwiseError, Vec8, buffer, check, turn};

/// Units of a sequence are first those of its queries, in place, then those of its new keys and of its new values. A unit
/// has two vectors that are rotated with each other, or one that is copied; `half` vectors are half of a head's rotated
/// features.
#[cube(launch_unchecked)]
pub fn append_rows<E: Float>(
    qkv: &mut [Vec8<E>],
    cos: &[Vec8<E>],
    sin: &[Vec8<E>],
    keys: &mut [Vec8<E>],
    values: &mut [Vec8<E>],
    table: &[i32],
    lengths: &[i32],
    sequences: u32,
    heads: u32,
    kv_heads: u32,
    max_blocks: u32,
    #[comptime] vectors: u32,
    #[comptime] half: u32,
    #[comptime] block_size: u32,
) {
    // Units of a key.
    let of_key = comptime![vectors - half];
    let (queries, new_keys, new_values) = (heads * half, kv_heads * of_key, kv_heads * vectors);
    let of_sequence = queries + new_keys + new_values;
    let item = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    let sequence = item / of_sequence;
    if sequence < sequences {
        let length = lengths[sequence as usize];
        if length > 0 {
            let position = u32::cast_from(length) - 1;
            let page = u32::cast_from(table[(sequence * max_blocks + position / block_size) as usize]);
            let row = (page * block_size + position % block_size) * new_values;
            let first = sequence * (heads + 2 * kv_heads) * vectors;
            let nth = item % of_sequence;
            if nth < queries {
                if comptime![half > 0] {
                    let unit = nth % half;
                    let at = first + nth / half * vectors + unit;
                    let (low, high, angle) = (at as usize, (at + half) as usize, (sequence * half + unit) as usize);
                    let turned = turn::<E>(qkv[low], qkv[high], cos[angle], sin[angle], 1.0f32);
                    qkv[low] = turned.0;
                    qkv[high] = turned.1;
                }
            } else if nth < queries + new_keys {
                let of = nth - queries;
                let unit = of % of_key;
                let head = of / of_key * vectors;
                let from = first + heads * vectors + head;
                if unit < half {
                    if comptime![half > 0] {
                        let (low, high) = ((from + unit) as usize, (from + unit + half) as usize);
                        let angle = (sequence * half + unit) as usize;
                        let turned = turn::<E>(qkv[low], qkv[high], cos[angle], sin[angle], 1.0f32);
                        keys[(row + head + unit) as usize] = turned.0;
                        keys[(row + head + unit + half) as usize] = turned.1;
                    }
                } else {
                    // After the rotated ones, of which every unit has had two.
                    keys[(row + head + unit + half) as usize] = qkv[(from + unit + half) as usize];
                }
            } else {
                let of = nth - queries - new_keys;
                values[(row + of) as usize] = qkv[(first + (heads + kv_heads) * vectors + of) as usize];
            }
        }
    }
}

/// The angles of the new tokens: cosines and sines `[sequences, rotated / 2]` of the type of the heads, whose first
/// `rotated` features are turned ("rotate half").
#[derive(Clone, Copy, Debug)]
pub struct NewAngles<'a> {
    /// Cosines.
    pub cos: &'a Handle,
    /// Sines.
    pub sin: &'a Handle,
    /// Features, a multiple of 16.
    pub rotated: usize,
}

/// Writes the keys and values of the packed projection `qkv [sequences, heads + 2 kv_heads, head_dim]` to `keys` and
/// `values` at position `length - 1` of each sequence, of type `E` (2 bytes or fp32) without gaps. With `angles` it rotates
/// the keys, and the queries **in place**. `table` and `lengths` are `i32 [sequences, max_blocks]` and `i32 [sequences]`; a
/// sequence of length 0 is left out. The caller has checked that the table names pages of the cache.
///
/// # Errors
/// If there is no kernel for the shape, or a buffer is too small.
pub fn append<E: Float>(
    client: &Client,
    shape: DecodeShape,
    qkv: &Handle,
    angles: Option<NewAngles>,
    [keys, values]: [&Handle; 2],
    [table, lengths]: [&Handle; 2],
) -> Result<(), PointwiseError> {
    shape.refused()?;
    // Without angles nothing is read from their buffers.
    let NewAngles { cos, sin, rotated } = angles.unwrap_or(NewAngles { cos: keys, sin: keys, rotated: 0 });
    if rotated > 0 {
        check("rotated features", rotated, 16, shape.head_dim)?;
    }
    let (bytes, half, vectors) = (8 * size_of::<E>(), rotated / 16, shape.vectors());
    let items = shape.sequences * (shape.heads * half + shape.kv_heads * (2 * vectors - half));
    let of_angles = (shape.sequences * half).max(1);
    let cube = CubeShape::of(client);
    // SAFETY: units past the last vector do nothing, the others stay in their sequence and in its page, and no two of them
    // have the same vector.
    unsafe {
        launch_kernel!(append_rows<E>, client, cube.line(items), cube.dim();
            buffer("qkv", qkv, shape.packed(), bytes)?, buffer("cos", cos, of_angles, bytes)?,
            buffer("sin", sin, of_angles, bytes)?, buffer("keys", keys, shape.paged(), bytes)?,
            buffer("values", values, shape.paged(), bytes)?,
            buffer("table", table, shape.sequences * shape.max_blocks, 4)?,
            buffer("lengths", lengths, shape.sequences, 4)?;
            shape.sequences as u32, shape.heads as u32, shape.kv_heads as u32, shape.max_blocks as u32;
            vectors as u32, half as u32, shape.block_size as u32)
    };
    Ok(())
}
