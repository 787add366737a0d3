//! The states in front of chunks, one chunk after the other, and their gradients.
use super::{CubeShape, Form, PointwiseError, SsdShape, Vec4, buffer};
use crate::pointwise::{F32x4, cube_sums};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// The share of a head's state that a chunk leaves.
#[cube]
fn share_of(since: &[f32], block: u32, head: u32, #[comptime] form: Form) -> f32 {
    since[((block * comptime![form.heads] + head) * comptime![form.chunk] + comptime![form.chunk - 1]) as usize]
}

/// A unit for four columns of a state's row, for all chunks.
#[cube(launch_unchecked)]
pub fn states_in_front<E: Float>(
    summands: &[F32x4],
    since: &[f32],
    first: &[F32x4],
    in_front: &mut [Vec4<E>],
    last: &mut [F32x4],
    chunks: u32,
    items: u32,
    #[comptime] form: Form,
    #[comptime] begins: bool,
    #[comptime] ends: bool,
) {
    let item = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if item < items {
        let (columns, rows) = comptime![(form.columns() / 4, form.groups * form.state)];
        let (sample, place) = (item / comptime![columns * rows], item % comptime![columns * rows]);
        let group = place / comptime![columns * form.state];
        let head = group * comptime![form.serves()] + place % columns / comptime![form.head_dim / 4];
        let mut state = F32x4::new(0.0);
        if comptime![begins] {
            state = first[item as usize];
        }
        for c in 0..chunks {
            let block = sample * chunks + c;
            let at = (block * comptime![columns * rows] + place) as usize;
            let mut rounded = Vec4::<E>::empty();
            #[unroll]
            for i in 0..4usize {
                rounded.insert(i, E::cast_from(state.extract(i)));
            }
            in_front[at] = rounded;
            state = state * F32x4::new(share_of(since, block, head, form)) + summands[at];
        }
        if comptime![ends] {
            last[item as usize] = state;
        }
    }
}

/// The states in front of all chunks, `[b, c, g, n, h/g p]` of type `E`, from what chunks add, fp32 of the same shape,
/// and the decays `since`. `first` is the state in front of the sequence, else zero, and `last` the one behind it, both
/// fp32 `[b, g, n, h/g p]`.
///
/// # Errors
/// If there is no kernel for the shape, or a buffer is too short.
pub fn forward<E: Float>(
    client: &Client,
    [summands, since]: [&Handle; 2],
    first: Option<&Handle>,
    in_front: &Handle,
    last: Option<&Handle>,
    shape: SsdShape,
) -> Result<(), PointwiseError> {
    shape.check()?;
    let (cube, all) = (CubeShape::of(client), shape.states() / 4);
    let items = all / shape.chunks();
    // Written by nobody.
    let nowhere = client.empty(16);
    let last_states = match last {
        Some(last) => buffer("last", last, items, 16)?,
        None => buffer("last", &nowhere, 1, 16)?,
    };
    let first_states = match first {
        Some(first) => buffer("first", first, items, 16)?,
        None => buffer("first", summands, 1, 16)?,
    };
    // SAFETY: every unit stays in its columns, and the buffers hold all of them.
    unsafe {
        launch_kernel!(states_in_front<E>, client, cube.line(items), cube.dim();
            buffer("summands", summands, all, 16)?, buffer("since", since, shape.per_head(), 4)?, first_states,
            buffer("in_front", in_front, all, 4 * size_of::<E>())?, last_states; shape.chunks() as u32, items as u32;
            shape.form(false), first.is_some(), last.is_some())
    };
    Ok(())
}

/// A cube takes a part of a head's state, four columns a unit, from the last chunk to the first.
#[cube(launch_unchecked)]
pub fn states_in_front_gradients<E: Float>(
    in_front: &[Vec4<E>],
    gradient: &[F32x4],
    since: &[f32],
    summands_gradient: &mut [Vec4<E>],
    along: &mut [f32],
    samples: u32,
    chunks: u32,
    #[comptime] form: Form,
    #[comptime] cube: CubeShape,
) {
    let mut scratch = Shared::<[f32]>::new_slice(comptime![cube.scratch()]);
    let (columns, rows) = comptime![(form.columns() / 4, form.groups * form.state)];
    let (sample, head) = (CUBE_POS_X / comptime![form.heads], CUBE_POS_X % comptime![form.heads]);
    let (group, own) = (head / comptime![form.serves()], head % comptime![form.serves()]);
    let part = CUBE_POS_Y * comptime![cube.units] + UNIT_POS;
    let width = comptime![form.head_dim / 4];
    let row = group * comptime![form.state] + part / width;
    let place = row * columns + own * width + part % width;
    let here = part < comptime![form.state * form.head_dim / 4];
    let mut total = F32x4::new(0.0);
    for step in 0..chunks {
        let block = sample * chunks + chunks - 1 - step;
        let at = (block * comptime![columns * rows] + place) as usize;
        let mut dot = 0.0f32;
        if here {
            let state = in_front[at];
            let mut rounded = Vec4::<E>::empty();
            #[unroll]
            for i in 0..4usize {
                rounded.insert(i, E::cast_from(total.extract(i)));
                dot += total.extract(i) * f32::cast_from(state.extract(i));
            }
            summands_gradient[at] = rounded;
            total = total * F32x4::new(share_of(since, block, head, form)) + gradient[at];
        }
        let (dot, _) = cube_sums(dot, 0.0, &mut scratch, step % 2, cube);
        if UNIT_POS == 0 {
            let blocks = samples * chunks;
            along[((CUBE_POS_Y * blocks + block) * comptime![form.heads] + head) as usize] = dot;
        }
    }
}

/// The gradients of what chunks add, of type `E`, and of the shares that chunks leave, in parts of sums over the state
/// (`along`, fp32, [`SsdShape::parts`] times `[b, c, h]`), from that of the states in front of chunks, fp32.
pub fn backward<E: Float>(
    client: &Client,
    [in_front, gradient, since]: [&Handle; 3],
    [summands_gradient, along]: [&Handle; 2],
    shape: SsdShape,
) -> Result<(), PointwiseError> {
    shape.check()?;
    let (cube, all, parts) = (CubeShape::of(client), shape.states() / 4, shape.parts(client)[1]);
    let blocks = shape.samples * shape.chunks();
    // SAFETY: every unit stays in its columns, and the buffers hold all of them.
    unsafe {
        launch_kernel!(states_in_front_gradients<E>, client,
            CubeCount::Static((shape.samples * shape.heads) as u32, parts as u32, 1), cube.dim();
            buffer("in_front", in_front, all, 4 * size_of::<E>())?, buffer("gradient", gradient, all, 16)?,
            buffer("since", since, shape.per_head(), 4)?,
            buffer("summands_gradient", summands_gradient, all, 4 * size_of::<E>())?,
            buffer("along", along, parts * blocks * shape.heads, 4)?; shape.samples as u32, shape.chunks() as u32;
            shape.form(false), cube)
    };
    Ok(())
}
