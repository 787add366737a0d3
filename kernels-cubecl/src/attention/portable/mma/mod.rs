//! Flash attention with `mma.sync` on bf16 and f16, for NVIDIA GPUs from Ampere on: head dimensions that are multiples
//! of 16, up to 256. Accumulators and statistics are f32, every sum has a fixed order, no atomics. The GEMMs' operands
//! are rounded to the type of the tensors.
pub mod dkdv;
pub mod dq;
pub mod forward;
pub(crate) mod tile;

use super::call::{Call, arg};
use super::{Element, delta};
use crate::attention::{AttentionError, AttentionShape, CallOptions, Gradients, Half, Saved, Tensor4};
use cubecl::ir::features::MmaConfig;
use cubecl::prelude::*;
use cubecl::server::Handle;
pub use tile::StridesCompilationArg;
use tile::{ROWS, StridesLaunch, UNITS};

/// Largest head dimension.
const LONGEST: usize = 256;

/// Whether the device has these kernels for these head dimensions.
pub fn has_kernel(client: &Client, half: Half, shape: &AttentionShape) -> bool {
    let fits = |length: usize| length > 0 && length.is_multiple_of(16) && length <= LONGEST;
    let shared = client.properties().hardware.max_shared_memory_size;
    fits(shape.head_dim)
        && fits(shape.value_dim)
        && shared_bytes(shape) <= shared
        && by_half!(half, E => has_mma::<E>(client))
}

/// Whether the device has the instruction for this type, with sums in fp32.
pub(crate) fn has_mma<E: Float>(client: &Client) -> bool {
    let (element, acc) = (E::elem_type_native(), f32::elem_type_native());
    let config = MmaConfig { a_type: element, b_type: element, cd_type: acc, m: 16, n: 8, k: 16 };
    client.properties().hardware.plane_size_max == 32 && client.features().matmul.mma.contains(&config)
}

/// The most shared memory that one of the kernels needs.
fn shared_bytes(shape: &AttentionShape) -> usize {
    let (head, value) = (tile::pitch(shape.head_dim), tile::pitch(shape.value_dim));
    let forward = ROWS * head + forward::block(shape.head_dim, shape.value_dim) * (head + value);
    let backward = (ROWS + dq::BLOCK.max(dkdv::BLOCK)) * (head + value);
    4 * forward.max(backward)
}

/// A call of these kernels, with all checks done but those of its tensors.
fn call<'a>(
    client: &'a Client,
    shape: &'a AttentionShape,
    scale: f32,
    options: &'a CallOptions<'a>,
) -> Result<Call<'a>, AttentionError> {
    if !has_kernel(client, options.element, shape) {
        let AttentionShape { head_dim, value_dim, .. } = *shape;
        return Err(AttentionError::HeadDim { head_dim, value_dim });
    }
    let element = match options.element {
        Half::Bf16 => Element::Bf16,
        Half::F16 => Element::F16,
    };
    Ok(Call { client, element, shape, options, scale: f64::from(scale) })
}

/// A tensor in vectors of `width` numbers, and its strides in vectors.
fn vectors(tensor: &Tensor4, width: usize) -> (BufferArg, StridesLaunch) {
    let [by_row, by_batch, by_head] = tensor.strides.map(|stride| (stride / width) as u32);
    // SAFETY: `Call::check` compared the extent of the tensor with the size of its buffer.
    let buffer = unsafe { BufferArg::from_raw_parts(tensor.handle.clone(), tensor.extent() / width) };
    (buffer, StridesLaunch::new(by_row, by_batch, by_head))
}

/// Strides must be multiples of 16 bytes.
fn aligned(tensors: &[(&'static str, &Tensor4)]) -> Result<(), AttentionError> {
    match tensors.iter().find(|(_, tensor)| tensor.strides.iter().any(|stride| stride % 8 != 0)) {
        Some((name, tensor)) => Err(AttentionError::Strides { name, strides: tensor.strides }),
        None => Ok(()),
    }
}

/// A cube for each block of `rows` rows of every head.
fn cubes(shape: &AttentionShape, rows: usize, heads: usize) -> CubeCount {
    CubeCount::Static(rows.div_ceil(ROWS) as u32, heads as u32, shape.batch as u32)
}

/// As [`portable::forward`](super::forward), for tensors of type `options.element` whose strides are multiples of 16
/// bytes.
///
/// # Errors
/// If there is no kernel ([`has_kernel`]), or sizes do not fit each other or their buffers.
pub fn forward(
    client: &Client,
    shape: &AttentionShape,
    scale: f32,
    options: &CallOptions,
    (q, k, v): (&Tensor4, &Tensor4, &Tensor4),
    out: &Tensor4,
    lse: &Handle,
) -> Result<(), AttentionError> {
    let call = call(client, shape, scale, options)?;
    call.check_forward([q, k, v, out], lse)?;
    aligned(&[("q", q), ("k", k), ("v", v), ("out", out)])?;
    let [query_starts, key_starts] = call.starts(q);
    let ((q, q_strides), (k, k_strides), (v, v_strides)) = (vectors(q, 8), vectors(k, 8), vectors(v, 8));
    let (out, out_strides) = vectors(out, 2);
    by_half!(options.element, E => {
        // SAFETY: rows past the last are neither read nor written; the checks above bound every other access.
        unsafe {
            launch_kernel!(forward::mma_forward<E>, client, cubes(shape, shape.queries, shape.heads),
                CubeDim::new_1d(UNITS);
                q, k, v, out, call.statistic_arg(lse), query_starts, key_starts, q_strides, k_strides, v_strides,
                out_strides, call.sizes(), call.dropout(); scale; call.plan())
        }
    });
    Ok(())
}

/// As [`portable::backward`](super::backward), for tensors of type `options.element` whose strides are multiples of 16
/// bytes.
///
/// # Errors
/// If there is no kernel ([`has_kernel`]), or sizes do not fit each other or their buffers.
pub fn backward(
    client: &Client,
    shape: &AttentionShape,
    scale: f32,
    options: &CallOptions,
    saved: Saved,
    dout: &Tensor4,
    gradients: Gradients,
) -> Result<(), AttentionError> {
    let call = call(client, shape, scale, options)?;
    call.check_backward(&saved, dout, &gradients)?;
    let Saved { q, k, v, out, lse } = saved;
    aligned(&[("q", q), ("k", k), ("v", v), ("dout", dout)])?;
    aligned(&[("dq", gradients.dq), ("dk", gradients.dk), ("dv", gradients.dv)])?;
    let delta = client.empty(4 * shape.statistics_len());
    let (count, dim) = call.cubes(shape.queries, shape.heads);
    by_half!(options.element, E => {
        // SAFETY: units past the last query do nothing; the checks above bound every access of the others.
        unsafe {
            launch_kernel!(delta::portable_delta<E>, client, count, dim;
                arg(out), arg(dout), call.statistic_arg(&delta), call.sizes(); shape.value_dim)
        }
    });
    let read = [q, k, v, dout];
    by_half!(options.element, E => {
        let [query_starts, key_starts] = call.starts(q);
        let [(q, q_strides), (k, k_strides), (v, v_strides), (dout, dout_strides)] = read.map(|x| vectors(x, 8));
        let (dq, dq_strides) = vectors(gradients.dq, 2);
        // SAFETY: rows past the last are neither read nor written; the checks above bound every other access.
        unsafe {
            launch_kernel!(dq::mma_dq<E>, client, cubes(shape, shape.queries, shape.heads), CubeDim::new_1d(UNITS);
                q, k, v, dout, call.statistic_arg(lse), call.statistic_arg(&delta), dq, query_starts, key_starts,
                q_strides, k_strides, v_strides, dout_strides, dq_strides, call.sizes(), call.dropout(); scale;
                call.plan())
        }
    });
    by_half!(options.element, E => {
        let [query_starts, key_starts] = call.starts(q);
        let [(q, q_strides), (k, k_strides), (v, v_strides), (dout, dout_strides)] = read.map(|x| vectors(x, 8));
        let (dk, dk_strides) = vectors(gradients.dk, 2);
        let (dv, dv_strides) = vectors(gradients.dv, 2);
        // SAFETY: rows past the last are neither read nor written; the checks above bound every other access.
        unsafe {
            launch_kernel!(dkdv::mma_dkdv<E>, client, cubes(shape, shape.keys, shape.kv_heads), CubeDim::new_1d(UNITS);
                q, k, v, dout, call.statistic_arg(lse), call.statistic_arg(&delta), dk, dv, query_starts, key_starts,
                q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides, call.sizes(), call.dropout();
                scale; call.plan())
        }
    });
    Ok(())
}
