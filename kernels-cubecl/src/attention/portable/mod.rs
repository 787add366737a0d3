//! Flash attention for every CubeCL runtime: no shared memory, no planes, no matrix units, any sizes and strides, in
//! f64, f32, bf16 and f16 (sums in f64 and f32). Slow: a unit works through a row on its own. Never holds the scores.
mod call;
mod delta;
pub mod draw;
mod exponential;
pub mod forward;
pub mod key_gradient;
pub mod mma;
pub mod query_gradient;
mod row;
pub mod sight;

pub use call::Element;

use super::{AttentionError, AttentionShape, Extras, Gradients, Saved, Tensor4};
use call::{Call, arg, by_element};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// `out = softmax(q kᵀ · scale) v` and the log-sum-exp of the scaled scores, `lse` `[batch, heads,
/// shape.padded_queries()]` in f32 (f64 for f64). A query that sees no key gets zeros and -∞. `extras.element` is not
/// read.
///
/// # Errors
/// If sizes do not fit each other or their buffers.
#[allow(clippy::too_many_arguments)]
pub fn forward(
    client: &Client,
    element: Element,
    shape: &AttentionShape,
    scale: f64,
    extras: &Extras,
    (q, k, v): (&Tensor4, &Tensor4, &Tensor4),
    out: &Tensor4,
    lse: &Handle,
) -> Result<(), AttentionError> {
    let call = Call { client, element, shape, extras, scale };
    call.check_forward([q, k, v, out], lse)?;
    let (count, dim) = call.cubes(shape.queries, shape.heads);
    let [query_starts, key_starts] = call.starts(q);
    by_element!(element, E, A => {
        // SAFETY: units past the last query do nothing; the checks above bound every access of the others.
        unsafe {
            forward::forward::launch_unchecked::<E, A>(
                client,
                count,
                dim,
                arg(q),
                arg(k),
                arg(v),
                arg(out),
                call.statistic_arg(lse),
                query_starts,
                key_starts,
                call.sizes(),
                call.draws(),
                call.scale(),
                call.plan(),
            )
        }
    });
    Ok(())
}

/// The gradients of `q`, `k` and `v`, given that of the output. Every sum is taken in one order. For ring attention
/// `out` and `lse` are those of the whole ring.
///
/// # Errors
/// If sizes do not fit each other or their buffers.
#[allow(clippy::too_many_arguments)]
pub fn backward(
    client: &Client,
    element: Element,
    shape: &AttentionShape,
    scale: f64,
    extras: &Extras,
    saved: Saved,
    out_gradient: &Tensor4,
    gradients: Gradients,
) -> Result<(), AttentionError> {
    let call = Call { client, element, shape, extras, scale };
    call.check_backward(&saved, out_gradient, &gradients)?;
    let Saved { q, k, v, out, lse } = saved;
    let delta = client.empty(element.statistic_size() * shape.statistics_len());
    let (count, dim) = call.cubes(shape.queries, shape.heads);
    let [query_starts, key_starts] = call.starts(q);
    by_element!(element, E, A => {
        // SAFETY: units past the last query do nothing; the checks above bound every access of the others.
        unsafe {
            query_gradient::query_gradient::launch_unchecked::<E, A>(
                client,
                count,
                dim,
                arg(q),
                arg(k),
                arg(v),
                arg(out),
                arg(out_gradient),
                call.statistic_arg(lse),
                call.statistic_arg(&delta),
                arg(gradients.q),
                query_starts,
                key_starts,
                call.sizes(),
                call.draws(),
                call.scale(),
                call.plan(),
            )
        }
    });
    let (count, dim) = call.cubes(shape.keys, shape.kv_heads);
    let [query_starts, key_starts] = call.starts(q);
    by_element!(element, E, A => {
        // SAFETY: units past the last key do nothing; the checks above bound every access of the others.
        unsafe {
            key_gradient::key_gradient::launch_unchecked::<E, A>(
                client,
                count,
                dim,
                arg(q),
                arg(k),
                arg(v),
                arg(out_gradient),
                call.statistic_arg(lse),
                call.statistic_arg(&delta),
                arg(gradients.k),
                arg(gradients.v),
                query_starts,
                key_starts,
                call.sizes(),
                call.draws(),
                call.scale(),
                call.plan(),
            )
        }
    });
    Ok(())
}
