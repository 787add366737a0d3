//! Flash attention for Hopper: forward and backward without a matrix of scores in memory.
//!
//! Layout `[seq, batch, heads, head_dim]` with any strides of the first three dimensions; bf16 or fp16 in and out, fp32
//! scores, softmax, statistics and sums. Grouped queries: query head `h` reads key head `h / (heads / kv_heads)`.
//!
//! A ring computes attention over keys that lie on several ranks: each step is a [`forward`] on the keys of one rank,
//! whose output and log-sum-exp [`merge`](merge::merge) adds to what the steps before gave; each step of its backward
//! pass is a [`backward`] with the output and log-sum-exp of the whole ring, and the gradients of the steps add up.
#![allow(missing_docs, reason = "the launch macros write public items without documentation")]

mod backward;
pub mod delta;
pub mod draw;
mod error;
pub mod forward;
pub mod joint_gradient;
pub mod joint_sum;
pub mod key_gradient;
mod maps;
pub mod merge;
pub mod portable;
mod problem;
pub mod query_gradient;
mod query_walk;
mod tensor;
pub mod tile;
pub mod variant;
mod walk;

pub use crate::hopper::mma::Half;
pub use backward::{BackwardPlan, Gradients, Saved, Sums, backward, key_gradients, query_gradients, row_sums};
pub use error::AttentionError;
pub use problem::{AttentionShape, Dropout, Extras, Packed};
pub use tensor::Tensor4;
pub use variant::Variant;

use crate::hopper::mma::ROWS;
use crate::tiling::QUERY_ROWS;
use cubecl::prelude::*;
use cubecl::server::Handle;
use forward::ForwardPlan;
use variant::SizesLaunch;

/// Units of a cube of the kernels with matrix products: two warpgroups.
const UNITS: u32 = 256;

/// The part of a handle that a kernel takes as a flat buffer of `len` numbers of 4 bytes.
fn flat(handle: &Handle, len: usize) -> BufferArg {
    // SAFETY: the callers compared `len` with the size of the buffer.
    unsafe { BufferArg::from_raw_parts(handle.clone(), len) }
}

/// Where packed sequences begin: queries, then keys. Without any, no kernel reads the buffers, and `unread` stands for
/// them.
fn starts(extras: &Extras, unread: &Handle) -> (BufferArg, BufferArg) {
    match extras.packed {
        Some(packed) => {
            (flat(packed.query_starts, packed.sequences + 1), flat(packed.key_starts, packed.sequences + 1))
        }
        None => (flat(unread, 1), flat(unread, 1)),
    }
}

/// The second and third dimension of a grid over blocks of `rows` queries or keys, of which the longest sequence has
/// `longest` when they are packed, and `len` otherwise.
fn grid(shape: &AttentionShape, extras: &Extras, longest: Option<usize>, len: usize, rows: usize) -> (u32, u32) {
    let sequences = extras.packed.map_or(shape.batch, |packed| packed.sequences);
    (sequences as u32, longest.unwrap_or(len).div_ceil(rows) as u32)
}

fn sizes(shape: &AttentionShape, extras: &Extras) -> SizesLaunch {
    let first = extras.first_query.unwrap_or(shape.keys as i64 - shape.queries as i64);
    let dropout = extras.dropout;
    SizesLaunch::new(
        shape.queries as u32,
        shape.keys as u32,
        first as i32,
        shape.window.map_or(1, |window| window.min(problem::FURTHEST) as i32),
        shape.padded_queries() as u32,
        shape.statistics_len() as u32,
        (shape.heads / shape.kv_heads) as u32,
        dropout.map_or(0, |dropout| dropout.limit()),
        dropout.map_or(1.0, |dropout| 1.0 / (1.0 - dropout.p)),
        dropout.map_or(0, |dropout| dropout.first[3] as u32),
    )
}

/// The keys of dropout for every row of scores, `u32 [2, batch, heads, padded_queries]`.
fn drop_keys(client: &Client, shape: &AttentionShape, dropout: &Dropout) -> Handle {
    let keys = client.empty(2 * 4 * shape.statistics_len());
    let [batch, head, query, _] = dropout.first.map(|first| first as u64);
    // SAFETY: one unit for each of the padded rows.
    unsafe {
        draw::drop_keys::launch_unchecked(
            client,
            CubeCount::Static(shape.padded_queries() as u32 / draw::UNITS, shape.heads as u32, shape.batch as u32),
            CubeDim::new_1d(draw::UNITS),
            flat(&keys, 2 * shape.statistics_len()),
            shape.padded_queries() as u32,
            dropout.seed,
            batch,
            head,
            query,
            dropout.heads as u64,
            dropout.queries as u64,
        );
    }
    keys
}

/// `out = softmax(q kᵀ · scale) v` and the log-sum-exp of the scaled scores, `lse`: fp32
/// `[batch, heads, shape.padded_queries()]`. `scale` is positive. A query that sees no key gets zeros and minus
/// infinity.
pub fn forward(
    client: &Client,
    shape: &AttentionShape,
    scale: f32,
    extras: &Extras,
    (q, k, v): (&Tensor4, &Tensor4, &Tensor4),
    out: &Tensor4,
    lse: &Handle,
) -> Result<(), AttentionError> {
    let plan = ForwardPlan::fastest(Variant::of(shape, extras));
    forward_planned(client, shape, scale, extras, (q, k, v), out, lse, plan)
}

/// [`forward`] with the choices spelled out, for measurements.
#[allow(clippy::too_many_arguments)]
pub fn forward_planned(
    client: &Client,
    shape: &AttentionShape,
    scale: f32,
    extras: &Extras,
    (q, k, v): (&Tensor4, &Tensor4, &Tensor4),
    out: &Tensor4,
    lse: &Handle,
    plan: ForwardPlan,
) -> Result<(), AttentionError> {
    shape.check(client, extras)?;
    q.check("q", shape.query_shape())?;
    k.check("k", shape.key_shape())?;
    v.check("v", shape.value_shape())?;
    out.check("out", shape.out_shape())?;
    shape.check_statistics("lse", lse)?;
    let longest = extras.packed.map(|packed| packed.longest_query);
    let (sequences, blocks) = grid(shape, extras, longest, shape.queries, QUERY_ROWS);
    let keys = extras.dropout.map(|dropout| drop_keys(client, shape, &dropout));
    let drop_keys = keys.as_ref().map_or_else(|| flat(lse, 1), |keys| flat(keys, 2 * shape.statistics_len()));
    let (query_starts, key_starts) = starts(extras, lse);
    // SAFETY: the tensor maps bound every access but those to `lse` and the dropout keys, whose rows are padded to
    // whole blocks and which the kernel bounds itself when sequences are packed.
    unsafe {
        forward::forward::launch_unchecked(
            client,
            CubeCount::Static(shape.heads as u32, sequences, blocks),
            CubeDim::new_1d(UNITS),
            maps::load(q, ROWS),
            maps::load(k, plan.block),
            maps::load(v, plan.block),
            maps::store(out, plan.variant.packed),
            flat(lse, shape.statistics_len()),
            drop_keys,
            query_starts,
            key_starts,
            sizes(shape, extras),
            scale * core::f32::consts::LOG2_E,
            plan,
        );
    }
    Ok(())
}
