//! Flash attention for every CubeCL runtime: no shared memory, no planes, no matrix units, any sizes and strides, in
//! f64, f32, bf16 and f16 (accumulators in f64 and f32). Slow: one unit computes a whole row. The scores are never
//! stored.
mod call;
mod delta;
pub mod dkdv;
pub mod dq;
pub mod dropout;
mod exp;
pub mod forward;
pub mod mask;
pub mod mma;
mod row;

pub use call::Element;

use super::{AttentionError, AttentionShape, CallOptions, Gradients, Saved, Tensor4};
use call::{Call, arg, by_element};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// `out = softmax(q kᵀ · scale) v` and the log-sum-exp of the scaled scores, `lse` `[batch, heads,
/// shape.padded_queries()]` in f32 (f64 for f64). A query without a visible key gets zeros and -∞. `options.element` is
/// not read.
///
/// # Errors
/// If sizes do not fit each other or their buffers.
pub fn forward(
    client: &Client,
    element: Element,
    shape: &AttentionShape,
    scale: f64,
    options: &CallOptions,
    (q, k, v): (&Tensor4, &Tensor4, &Tensor4),
    out: &Tensor4,
    lse: &Handle,
) -> Result<(), AttentionError> {
    let call = Call { client, element, shape, options, scale };
    call.check_forward([q, k, v, out], lse)?;
    let (count, dim) = call.cubes(shape.queries, shape.heads);
    let [query_starts, key_starts] = call.starts(q);
    by_element!(element, E, A => {
        // SAFETY: units past the last query do nothing; the checks above bound every access of the others.
        unsafe {
            launch_kernel!(forward::portable_forward<E, A>, client, count, dim;
                arg(q), arg(k), arg(v), arg(out), call.statistic_arg(lse), query_starts, key_starts, call.sizes(),
                call.dropout(); call.scale(); call.plan())
        }
    });
    Ok(())
}

/// dQ, dK and dV from dO. Every sum has a fixed order. For ring attention `out` and `lse` are those of the whole ring.
///
/// # Errors
/// If sizes do not fit each other or their buffers.
pub fn backward(
    client: &Client,
    element: Element,
    shape: &AttentionShape,
    scale: f64,
    options: &CallOptions,
    saved: Saved,
    dout: &Tensor4,
    gradients: Gradients,
) -> Result<(), AttentionError> {
    let call = Call { client, element, shape, options, scale };
    call.check_backward(&saved, dout, &gradients)?;
    let Saved { q, k, v, out, lse } = saved;
    let delta = client.empty(element.statistic_size() * shape.statistics_len());
    let (count, dim) = call.cubes(shape.queries, shape.heads);
    let [query_starts, key_starts] = call.starts(q);
    by_element!(element, E, A => {
        // SAFETY: units past the last query do nothing; the checks above bound every access of the others.
        unsafe {
            launch_kernel!(dq::portable_dq<E, A>, client, count, dim;
                arg(q), arg(k), arg(v), arg(out), arg(dout), call.statistic_arg(lse), call.statistic_arg(&delta),
                arg(gradients.dq), query_starts, key_starts, call.sizes(), call.dropout(); call.scale(); call.plan())
        }
    });
    let (count, dim) = call.cubes(shape.keys, shape.kv_heads);
    let [query_starts, key_starts] = call.starts(q);
    by_element!(element, E, A => {
        // SAFETY: units past the last key do nothing; the checks above bound every access of the others.
        unsafe {
            launch_kernel!(dkdv::portable_dkdv<E, A>, client, count, dim;
                arg(q), arg(k), arg(v), arg(dout), call.statistic_arg(lse), call.statistic_arg(&delta),
                arg(gradients.dk), arg(gradients.dv), query_starts, key_starts, call.sizes(), call.dropout();
                call.scale(); call.plan())
        }
    });
    Ok(())
}
