//! Flash attention with `mma.sync` on bf16 and f16, for NVIDIA GPUs from Ampere on: head sizes that are multiples of
//! 16, up to 256. Sums and statistics are f32, every sum has one order, no atomics. What the products read is rounded
//! to the type of the tensors.
pub mod forward;
pub mod key_gradient;
pub mod query_gradient;
mod tile;

use super::call::{Call, arg};
use super::{Element, delta};
use crate::attention::{AttentionError, AttentionShape, Extras, Gradients, Half, Saved, Tensor4};
use cubecl::ir::features::MmaConfig;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};
pub use tile::PlaceCompilationArg;
use tile::{PlaceLaunch, ROWS, UNITS};

/// Longest head.
const LONGEST: usize = 256;

/// Whether the device has these kernels for heads of these sizes.
pub fn has_kernel(client: &Client, half: Half, shape: &AttentionShape) -> bool {
    let fits = |length: usize| length > 0 && length.is_multiple_of(16) && length <= LONGEST;
    let element = match half {
        Half::Bf16 => bf16::elem_type_native(),
        Half::F16 => f16::elem_type_native(),
    };
    let sums = f32::elem_type_native();
    let config = MmaConfig { a_type: element, b_type: element, cd_type: sums, m: 16, n: 8, k: 16 };
    let shared = client.properties().hardware.max_shared_memory_size;
    fits(shape.head_dim)
        && fits(shape.value_dim)
        && shared_bytes(shape) <= shared
        && client.properties().hardware.plane_size_max == 32
        && client.features().matmul.mma.contains(&config)
}

/// The most shared memory that one of the kernels takes.
fn shared_bytes(shape: &AttentionShape) -> usize {
    let (head, value) = (tile::pitch(shape.head_dim), tile::pitch(shape.value_dim));
    let forward = ROWS * head + forward::block(shape.head_dim, shape.value_dim) * (head + value);
    let backward = (ROWS + query_gradient::BLOCK.max(key_gradient::BLOCK)) * (head + value);
    4 * forward.max(backward)
}

/// A call of these kernels after all checks, but those of its tensors.
fn call<'a>(
    client: &'a Client,
    shape: &'a AttentionShape,
    scale: f32,
    extras: &'a Extras<'a>,
) -> Result<Call<'a>, AttentionError> {
    if !has_kernel(client, extras.element, shape) {
        let AttentionShape { head_dim, value_dim, .. } = *shape;
        return Err(AttentionError::HeadDim { head_dim, value_dim });
    }
    let element = match extras.element {
        Half::Bf16 => Element::Bf16,
        Half::F16 => Element::F16,
    };
    Ok(Call { client, element, shape, extras, scale: f64::from(scale) })
}

/// Runs `$body` with `$E` the type of `$half`.
macro_rules! by_half {
    ($half:expr, $E:ident => $body:expr) => {
        match $half {
            Half::Bf16 => {
                type $E = bf16;
                $body
            }
            Half::F16 => {
                type $E = f16;
                $body
            }
        }
    };
}

/// A tensor in vectors of `width` numbers, and where its rows lie.
fn vectors(tensor: &Tensor4, width: usize) -> (BufferArg, PlaceLaunch) {
    let [by_row, by_batch, by_head] = tensor.strides.map(|stride| (stride / width) as u32);
    // SAFETY: `Call::check` compared the extent of the tensor with the size of its buffer.
    let buffer = unsafe { BufferArg::from_raw_parts(tensor.handle.clone(), tensor.extent() / width) };
    (buffer, PlaceLaunch::new(by_row, by_batch, by_head))
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

/// As [`portable::forward`](super::forward), for tensors of type `extras.element` whose strides are multiples of 16
/// bytes.
///
/// # Errors
/// If there is no kernel ([`has_kernel`]), or sizes do not fit each other or their buffers.
pub fn forward(
    client: &Client,
    shape: &AttentionShape,
    scale: f32,
    extras: &Extras,
    (q, k, v): (&Tensor4, &Tensor4, &Tensor4),
    out: &Tensor4,
    lse: &Handle,
) -> Result<(), AttentionError> {
    let call = call(client, shape, scale, extras)?;
    call.check_forward([q, k, v, out], lse)?;
    aligned(&[("q", q), ("k", k), ("v", v), ("out", out)])?;
    let [query_starts, key_starts] = call.starts(q);
    let ((q, q_place), (k, k_place), (v, v_place)) = (vectors(q, 8), vectors(k, 8), vectors(v, 8));
    let (out, out_place) = vectors(out, 2);
    by_half!(extras.element, E => {
        // SAFETY: rows past the last are neither read nor written; the checks above bound every other access.
        unsafe {
            forward::mma_forward::launch_unchecked::<E>(
                client,
                cubes(shape, shape.queries, shape.heads),
                CubeDim::new_1d(UNITS),
                q,
                k,
                v,
                out,
                call.statistic_arg(lse),
                query_starts,
                key_starts,
                q_place,
                k_place,
                v_place,
                out_place,
                call.sizes(),
                call.draws(),
                scale,
                call.plan(),
            )
        }
    });
    Ok(())
}

/// As [`portable::backward`](super::backward), for tensors of type `extras.element` whose strides are multiples of 16
/// bytes.
///
/// # Errors
/// If there is no kernel ([`has_kernel`]), or sizes do not fit each other or their buffers.
pub fn backward(
    client: &Client,
    shape: &AttentionShape,
    scale: f32,
    extras: &Extras,
    saved: Saved,
    out_gradient: &Tensor4,
    gradients: Gradients,
) -> Result<(), AttentionError> {
    let call = call(client, shape, scale, extras)?;
    call.check_backward(&saved, out_gradient, &gradients)?;
    let Saved { q, k, v, out, lse } = saved;
    aligned(&[("q", q), ("k", k), ("v", v), ("out_gradient", out_gradient)])?;
    aligned(&[("q_gradient", gradients.q), ("k_gradient", gradients.k), ("v_gradient", gradients.v)])?;
    let delta = client.empty(4 * shape.statistics_len());
    let (count, dim) = call.cubes(shape.queries, shape.heads);
    by_half!(extras.element, E => {
        // SAFETY: units past the last query do nothing; the checks above bound every access of the others.
        unsafe {
            delta::delta::launch_unchecked::<E>(
                client,
                count,
                dim,
                arg(out),
                arg(out_gradient),
                call.statistic_arg(&delta),
                call.sizes(),
                shape.value_dim,
            )
        }
    });
    let read = [q, k, v, out_gradient];
    by_half!(extras.element, E => {
        let [query_starts, key_starts] = call.starts(q);
        let [(q, q_place), (k, k_place), (v, v_place), (slope, slope_place)] = read.map(|x| vectors(x, 8));
        let (q_gradient, q_gradient_place) = vectors(gradients.q, 2);
        // SAFETY: rows past the last are neither read nor written; the checks above bound every other access.
        unsafe {
            query_gradient::mma_query_gradient::launch_unchecked::<E>(
                client,
                cubes(shape, shape.queries, shape.heads),
                CubeDim::new_1d(UNITS),
                q,
                k,
                v,
                slope,
                call.statistic_arg(lse),
                call.statistic_arg(&delta),
                q_gradient,
                query_starts,
                key_starts,
                q_place,
                k_place,
                v_place,
                slope_place,
                q_gradient_place,
                call.sizes(),
                call.draws(),
                scale,
                call.plan(),
            )
        }
    });
    by_half!(extras.element, E => {
        let [query_starts, key_starts] = call.starts(q);
        let [(q, q_place), (k, k_place), (v, v_place), (slope, slope_place)] = read.map(|x| vectors(x, 8));
        let (k_gradient, k_gradient_place) = vectors(gradients.k, 2);
        let (v_gradient, v_gradient_place) = vectors(gradients.v, 2);
        // SAFETY: rows past the last are neither read nor written; the checks above bound every other access.
        unsafe {
            key_gradient::mma_key_gradient::launch_unchecked::<E>(
                client,
                cubes(shape, shape.keys, shape.kv_heads),
                CubeDim::new_1d(UNITS),
                q,
                k,
                v,
                slope,
                call.statistic_arg(lse),
                call.statistic_arg(&delta),
                k_gradient,
                v_gradient,
                query_starts,
                key_starts,
                q_place,
                k_place,
                v_place,
                slope_place,
                k_gradient_place,
                v_gradient_place,
                call.sizes(),
                call.draws(),
                scale,
                call.plan(),
            )
        }
    });
    Ok(())
}
