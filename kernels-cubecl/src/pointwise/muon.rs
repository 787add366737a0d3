//! The element-wise steps of Muon, before and after its momentum is orthogonalised.
use super::{CubeShape, MOST, PointwiseError, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;

#[cube(launch_unchecked)]
pub fn mix_gradient<N: Size>(
    gradient: &[Vector<f32, N>],
    momentum: &mut [Vector<f32, N>],
    out: &mut [Vector<f32, N>],
    vectors: u32,
    decay: f32,
    gradient_scale: f32,
    #[comptime] nesterov: bool,
) {
    let at = (CUBE_POS_X * CUBE_DIM_X + UNIT_POS) as usize;
    if at < vectors as usize {
        let grad = gradient[at] * Vector::new(gradient_scale * (1.0 - decay));
        let next = momentum[at] * Vector::new(decay) + grad;
        momentum[at] = next;
        if comptime![nesterov] {
            out[at] = next * Vector::new(decay) + grad;
        } else {
            out[at] = next;
        }
    }
}

#[cube(launch_unchecked)]
pub fn take_step<N: Size>(
    step: &[Vector<f32, N>],
    master: &mut [Vector<f32, N>],
    vectors: u32,
    keep: f32,
    factor: f32,
) {
    let at = (CUBE_POS_X * CUBE_DIM_X + UNIT_POS) as usize;
    if at < vectors as usize {
        master[at] = master[at] * Vector::new(keep) - step[at] * Vector::new(factor);
    }
}

/// The widest fp32 vectors for all of these `len` elements.
fn width(handles: &[&Handle], len: usize) -> usize {
    let aligned = handles.iter().all(|handle| handle.offset_start.unwrap_or(0).is_multiple_of(16));
    if aligned && len.is_multiple_of(4) { 4 } else { 1 }
}

/// `m ← decay m + (1 − decay) gradient_scale g`; `out` becomes the new `m`, or with `nesterov` the same mean of it and
/// the gradient. All fp32 of `len` elements without gaps.
///
/// # Errors
/// If a buffer is too short.
pub fn mix(
    client: &Client,
    gradient: &Handle,
    (momentum, out): (&Handle, &Handle),
    len: usize,
    (decay, gradient_scale): (f32, f32),
    nesterov: bool,
) -> Result<(), PointwiseError> {
    let width = width(&[gradient, momentum, out], len);
    check("len", len, 1, MOST)?;
    let (cube, vectors) = (CubeShape::of(client), len / width);
    let gradient = buffer("gradient", gradient, vectors, 4 * width)?;
    let (momentum, out) = (buffer("momentum", momentum, vectors, 4 * width)?, buffer("out", out, vectors, 4 * width)?);
    let (count, dim) = (cube.line(vectors), cube.dim());
    // SAFETY: units past the last vector do nothing.
    unsafe {
        launch_kernel!(mix_gradient, client, count, dim, width;
            gradient, momentum, out; vectors as u32, decay, gradient_scale; nesterov)
    };
    Ok(())
}

/// `p ← keep p − factor step`, fp32 of `len` elements without gaps.
///
/// # Errors
/// If a buffer is too short.
pub fn apply(
    client: &Client,
    step: &Handle,
    master: &Handle,
    len: usize,
    (keep, factor): (f32, f32),
) -> Result<(), PointwiseError> {
    let width = width(&[step, master], len);
    check("len", len, 1, MOST)?;
    let (cube, vectors) = (CubeShape::of(client), len / width);
    let (step, master) = (buffer("step", step, vectors, 4 * width)?, buffer("master", master, vectors, 4 * width)?);
    let (count, dim) = (cube.line(vectors), cube.dim());
    // SAFETY: units past the last vector do nothing.
    unsafe { take_step::launch_unchecked(client, count, dim, width, step, master, vectors as u32, keep, factor) };
    Ok(())
}
