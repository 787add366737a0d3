//! FlashAttention for Hopper, forward and backward, in the names of the papers: Q, K, V, O, S = Q Kᵀ, P = softmax(S),
//! `lse`, dO, dP, dS, dQ, dK, dV, and `delta` = Σ O · dO (FlashAttention-2, arXiv 2307.08691; FlashAttention-3, arXiv
//! 2407.08608).
//!
//! Layout `[seq, batch, heads, head_dim]` with any strides of the first three dimensions; bf16 or fp16 in and out, fp32
//! scores, softmax, statistics and accumulators. Grouped-query attention: query head `h` reads key head `h / (heads /
//! kv_heads)`.
//!
//! A ring computes attention over keys that lie on several ranks. Each step is a [`forward`] on the keys of one rank;
//! [`merge`](merge::merge) merges its output and log-sum-exp into those of the previous steps. Each step of the
//! backward pass is a [`backward`] with the output and log-sum-exp of the whole ring, and the gradients of the steps
//! add up.
#![allow(missing_docs, reason = "the launch macros write public items without documentation")]

/// Runs `$body` with `$E` the type of `$half`.
macro_rules! by_half {
    ($half:expr, $E:ident => $body:expr) => {
        match $half {
            crate::hopper::mma::Half::Bf16 => {
                type $E = half::bf16;
                $body
            }
            crate::hopper::mma::Half::F16 => {
                type $E = half::f16;
                $body
            }
        }
    };
}

mod backward;
pub mod delta;
pub mod dkdv;
pub mod dq;
pub mod dq_accum;
pub mod dqdkdv;
pub mod dropout;
mod error;
pub mod forward;
mod kv_blocks;
mod maps;
pub mod masks;
pub mod merge;
pub mod portable;
mod problem;
mod q_blocks;
mod tensor;
pub mod tile;
pub mod variant;

pub use crate::hopper::mma::Half;
pub use backward::{BackwardPlan, BackwardStats, Gradients, Saved, backward, launch_dkdv, launch_dq, preprocess};
pub use error::AttentionError;
pub use masks::{BitMask, ScoreMasks};
pub use problem::{AttentionShape, CallOptions, Dropout, Packed};
pub use tensor::Tensor4;
pub use variant::Variant;

use crate::hopper::mma::ROWS;
use crate::tiling::CUBE_QUERIES;
use cubecl::prelude::*;
use cubecl::server::Handle;
use forward::ForwardPlan;
use variant::SizesLaunch;

/// Units of a cube of the kernels with GEMMs: two warpgroups.
const UNITS: u32 = 256;

/// `len` numbers of 4 bytes of a handle, as a flat kernel argument.
fn flat(handle: &Handle, len: usize) -> BufferArg {
    // SAFETY: the callers checked that the buffer holds `len` numbers.
    unsafe { BufferArg::from_raw_parts(handle.clone(), len) }
}

/// Start offsets of packed sequences: of queries, then of keys. Without packing no kernel reads them, and `unread`
/// takes their place.
fn starts(options: &CallOptions, unread: &Handle) -> (BufferArg, BufferArg) {
    match options.packed {
        Some(packed) => {
            (flat(packed.query_starts, packed.sequences + 1), flat(packed.key_starts, packed.sequences + 1))
        }
        None => (flat(unread, 1), flat(unread, 1)),
    }
}

/// The second and third dimension of a grid over blocks of `rows` queries or keys. Packed sequences have at most
/// `longest` of them each; otherwise there are `len`.
fn grid(shape: &AttentionShape, options: &CallOptions, longest: Option<usize>, len: usize, rows: usize) -> (u32, u32) {
    let sequences = options.packed.map_or(shape.batch, |packed| packed.sequences);
    (sequences as u32, longest.unwrap_or(len).div_ceil(rows) as u32)
}

fn sizes(shape: &AttentionShape, options: &CallOptions) -> SizesLaunch {
    let first = options.first_query.unwrap_or(shape.keys as i64 - shape.queries as i64);
    let dropout = options.dropout;
    SizesLaunch::new(
        shape.queries as u32,
        shape.keys as u32,
        first as i32,
        shape.window.map_or(1, |window| window.min(problem::MAX_POSITION) as i32),
        shape.padded_queries() as u32,
        shape.statistics_len() as u32,
        (shape.heads / shape.kv_heads) as u32,
        dropout.map_or(0, |dropout| dropout.threshold()),
        options.masks.kept.map_or_else(|| dropout.map_or(1.0, |dropout| 1.0 / (1.0 - dropout.p)), |(_, factor)| factor),
        dropout.map_or(0, |dropout| dropout.first[3] as u32),
    )
}

/// Dropout keys for every row of scores, `u32 [2, batch, heads, padded_queries]`.
fn launch_dropout_keys(client: &Client, shape: &AttentionShape, dropout: &Dropout) -> Handle {
    let keys = client.empty(2 * 4 * shape.statistics_len());
    let [batch, head, query, _] = dropout.first.map(|first| first as u64);
    // SAFETY: one unit for each of the padded rows.
    unsafe {
        launch_kernel!(dropout::dropout_keys, client,
            CubeCount::Static(shape.padded_queries() as u32 / dropout::UNITS, shape.heads as u32, shape.batch as u32),
            CubeDim::new_1d(dropout::UNITS);
            flat(&keys, 2 * shape.statistics_len());
            shape.padded_queries() as u32, dropout.seed, batch, head, query, dropout.heads as u64,
            dropout.queries as u64);
    }
    keys
}

/// `out = softmax(q kᵀ · scale) v` and the log-sum-exp of the scaled scores, `lse`: fp32 `[batch, heads,
/// shape.padded_queries()]`. `scale` is positive. A query without a visible key gets zeros and minus infinity.
pub fn forward(
    client: &Client,
    shape: &AttentionShape,
    scale: f32,
    options: &CallOptions,
    (q, k, v): (&Tensor4, &Tensor4, &Tensor4),
    out: &Tensor4,
    lse: &Handle,
) -> Result<(), AttentionError> {
    let plan = ForwardPlan::fastest(Variant::of(shape, options));
    forward_planned(client, shape, scale, options, (q, k, v), out, lse, plan)
}

/// [`forward`] with an explicit plan, for measurements.
pub fn forward_planned(
    client: &Client,
    shape: &AttentionShape,
    scale: f32,
    options: &CallOptions,
    (q, k, v): (&Tensor4, &Tensor4, &Tensor4),
    out: &Tensor4,
    lse: &Handle,
    plan: ForwardPlan,
) -> Result<(), AttentionError> {
    shape.check(client, options)?;
    q.check("q", shape.query_shape())?;
    k.check("k", shape.key_shape())?;
    v.check("v", shape.value_shape())?;
    out.check("out", shape.out_shape())?;
    shape.check_statistics("lse", lse)?;
    let longest = options.packed.map(|packed| packed.longest_query);
    let (sequences, blocks) = grid(shape, options, longest, shape.queries, CUBE_QUERIES);
    let keys = options.dropout.map(|dropout| launch_dropout_keys(client, shape, &dropout));
    let dropout_keys = keys.as_ref().map_or_else(|| flat(lse, 1), |keys| flat(keys, 2 * shape.statistics_len()));
    let (query_starts, key_starts) = starts(options, lse);
    let rows_of = |mask: Option<&BitMask>| mask.map_or_else(|| masks::no_mask(lse), BitMask::of_queries);
    let (hidden, hidden_rows) = rows_of(options.masks.hidden);
    let (kept, kept_rows) = rows_of(options.masks.kept.map(|(mask, _)| mask));
    // SAFETY: the tensor maps bound every access but those to `lse`, the dropout keys and the masks. Rows of the first two
    // are padded to whole blocks, and the kernel bounds them itself when sequences are packed; masks are of the call's
    // shape, and are not read past their last row and word.
    unsafe {
        launch_kernel!(forward::attention_forward, client, CubeCount::Static(shape.heads as u32, sequences, blocks),
            CubeDim::new_1d(UNITS);
            maps::load(q, ROWS), maps::load(k, plan.block), maps::load(v, plan.block),
            maps::store(out, plan.variant.packed), flat(lse, shape.statistics_len()), dropout_keys, hidden, kept,
            query_starts, key_starts; hidden_rows, kept_rows, sizes(shape, options),
            scale * core::f32::consts::LOG2_E; plan);
    }
    Ok(())
}
