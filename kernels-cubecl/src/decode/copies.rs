//! The copies of a decode step's tokens in the order of their experts, with their probabilities, in one launch: a step has
//! so few of them that every unit can compare its copy with all others.
#![allow(missing_docs, reason = "the launch macros write public items without documentation")]

use cubecl::prelude::*;
use cubecl::server::Handle;

use super::MOST_COPIES;
use crate::pointwise::{CubeShape, PointwiseError, buffer, check};

/// Where the copies of tokens go.
#[derive(Clone, Copy, Debug)]
pub struct CopyTables<'a> {
    /// `[copies]`, in the order of the experts: `token · experts + expert`.
    pub slots: &'a Handle,
    /// `[copies]`: the token of each.
    pub tokens: &'a Handle,
    /// `[tokens, top_k]`: the copies of each token.
    pub rows: &'a Handle,
    /// `[copies]`, fp32: their probabilities.
    pub probabilities: &'a Handle,
}

/// A unit takes a copy.
#[cube(launch_unchecked)]
pub fn order_copies(
    choice: &[i32],
    weights: &[f32],
    slots: &mut [i32],
    tokens: &mut [i32],
    rows: &mut [i32],
    probabilities: &mut [f32],
    copies: u32,
    experts: u32,
    top_k: u32,
    #[comptime] softmax: bool,
) {
    let mut all = Shared::<[i32]>::new_slice(MOST_COPIES);
    let mut i = UNIT_POS;
    while i < copies {
        all[i as usize] = choice[i as usize];
        i += CUBE_DIM_X;
    }
    sync_cube();
    let copy = ABSOLUTE_POS_X;
    if copy < copies {
        let expert = all[copy as usize];
        let mut row = 0u32;
        for other in 0..copies {
            let of = all[other as usize];
            let is_before = of < expert || (of == expert && other < copy);
            row += select(is_before, 1u32, 0u32);
        }
        let token = copy / top_k;
        let at = token * experts;
        let mut p = weights[(at + u32::cast_from(expert)) as usize];
        if comptime![softmax] {
            let mut greatest = p;
            for k in 0..top_k {
                let of = u32::cast_from(all[(token * top_k + k) as usize]);
                greatest = max(greatest, weights[(at + of) as usize]);
            }
            let mut sum = 0.0f32;
            for k in 0..top_k {
                let of = u32::cast_from(all[(token * top_k + k) as usize]);
                sum += f32::exp(weights[(at + of) as usize] - greatest);
            }
            p = f32::exp(p - greatest) / sum;
        }
        slots[row as usize] = i32::cast_from(at) + expert;
        tokens[row as usize] = i32::cast_from(token);
        rows[copy as usize] = i32::cast_from(row);
        probabilities[row as usize] = p;
    }
}

/// Orders the copies of `choice [tokens, top_k]`, experts as i32, ascending for each token. `weights [tokens, experts]` are
/// the probabilities or, with `softmax`, logits: the probabilities are then a softmax over the chosen ones. All fp32.
///
/// # Errors
/// If there are more than [`MOST_COPIES`], or a buffer is too small.
pub fn order(
    client: &Client,
    [tokens, top_k, experts]: [usize; 3],
    [choice, weights]: [&Handle; 2],
    tables: CopyTables,
    softmax: bool,
) -> Result<(), PointwiseError> {
    let copies = tokens * top_k;
    check("copies", copies, 1, MOST_COPIES)?;
    check("experts", experts, 1, i32::MAX as usize / tokens)?;
    let (cube, table) = (CubeShape::of(client), |name, of| buffer(name, of, copies, 4));
    // SAFETY: a unit writes its own copy, and a row is a number below that of all copies; the buffers hold them.
    unsafe {
        launch_kernel!(order_copies, client, cube.line(copies), cube.dim();
            table("choice", choice)?, buffer("weights", weights, tokens * experts, 4)?, table("slots", tables.slots)?,
            table("tokens", tables.tokens)?, table("rows", tables.rows)?, table("probabilities", tables.probabilities)?;
            copies as u32, experts as u32, top_k as u32; softmax)
    };
    Ok(())
}
