//! The states between chunks, in fp32, one chunk after the other; forward, and their gradients from the last chunk to the
//! first. Both are one recurrence: `values = base + R S` with what reads the state, then `S ← stays S + Vᵀ values` with what
//! writes it. Forward `R` is `W` and `V` is `until K`; backward they change places.
pub mod kernel;

use super::{PointwiseError, SsdShape};
use crate::pointwise::{CubeShape, buffer};
use cubecl::prelude::*;
use cubecl::server::Handle;
pub(super) use kernel::shared_bytes;
use kernel::{Pass, chunk_states, columns};

impl SsdShape {
    /// Parts of a sum over a head's state.
    pub fn state_parts(&self) -> usize {
        self.head_dim / columns(self.form(false)) as usize
    }
}

/// What both directions read.
#[derive(Clone, Copy, Debug)]
pub struct PassInputs<'a> {
    /// K, `[b, c, g, l, n]` of type `E`.
    pub keys: &'a Handle,
    /// W, `[b, c, h, l, n]` of type `E`.
    pub corrections: &'a Handle,
    /// See [`Decays`](crate::pointwise::ssd::steps::Decays).
    pub until: &'a Handle,
    /// See [`Decays`](crate::pointwise::ssd::steps::Decays).
    pub since: &'a Handle,
}

/// Results of [`forward`].
#[derive(Clone, Copy, Debug)]
pub struct Passed<'a> {
    /// The states in front of chunks, `[b, c, h, p, n]` of type `E`.
    pub in_front: &'a Handle,
    /// The values without what states answer, `[b, c, h, l, p]` of type `E`.
    pub values: &'a Handle,
    /// The same times `until`, by column.
    pub values_until: Option<&'a Handle>,
    /// The state behind the last position, fp32 `[b, h, p, n]`.
    pub last: Option<&'a Handle>,
}

/// The states in front of chunks, and the values; `base` is U, `[b, c, h, l, p]` of type `E`, and `first` the state in front
/// of the sequence, fp32 `[b, h, p, n]`, else zero.
///
/// # Errors
/// If there is no kernel for the shape, or a buffer is too short.
pub fn forward<E: Float>(
    client: &Client,
    inputs: PassInputs,
    base: &Handle,
    first: Option<&Handle>,
    to: Passed,
    shape: SsdShape,
) -> Result<(), PointwiseError> {
    let pass = Pass {
        form: shape.form(false),
        backward: false,
        begins: first.is_some(),
        ends: to.last.is_some(),
        until: to.values_until.is_some(),
    };
    // Written by nobody.
    let nowhere = client.empty(16);
    let (size, state) = (size_of::<E>(), shape.states() / shape.chunks());
    let addend = match first {
        Some(first) => buffer("first", first, state, 4)?,
        None => buffer("first", inputs.since, 1, 4)?,
    };
    let until = match to.values_until {
        Some(until) => buffer("values_until", until, shape.per_head() * shape.head_dim, size)?,
        None => buffer("values_until", &nowhere, 1, size)?,
    };
    let last = match to.last {
        Some(last) => buffer("last", last, state, 4)?,
        None => buffer("last", &nowhere, 1, 4)?,
    };
    let results =
        [buffer("in_front", to.in_front, shape.states(), size)?, values("values", to.values, size, shape)?, until];
    let others = [addend, buffer("in_front", base, 1, size)?, last, buffer("along", &nowhere, 1, 4)?];
    launch::<E>(client, inputs, base, others, results, pass, shape)
}

/// From the gradient of the values through their chunk (`base`), and from the summand fp32 `[b, c, h, p, n]` of that of the
/// states in front of chunks: the gradients of the states behind chunks, `[b, c, h, p, n]`, and of the values, which is that
/// of U, both of type `E`; and the dot products of the former with the states in front, in parts of sums over the state (`along`,
/// fp32, [`SsdShape::state_parts`] times `[b, c, h]`).
///
/// # Errors
/// If there is no kernel for the shape, or a buffer is too short.
pub fn backward<E: Float>(
    client: &Client,
    inputs: PassInputs,
    [base, of_states, in_front]: [&Handle; 3],
    [of_behind, of_values, along]: [&Handle; 3],
    shape: SsdShape,
) -> Result<(), PointwiseError> {
    let pass = Pass { form: shape.form(false), backward: true, begins: false, ends: false, until: false };
    let (size, nowhere) = (size_of::<E>(), client.empty(16));
    let parts = shape.state_parts() * shape.samples * shape.chunks() * shape.heads;
    let results = [
        buffer("of_behind", of_behind, shape.states(), size)?,
        values("of_values", of_values, size, shape)?,
        buffer("values_until", &nowhere, 1, size)?,
    ];
    let others = [
        buffer("of_states", of_states, shape.states(), 4)?,
        buffer("in_front", in_front, shape.states(), size)?,
        buffer("last", &nowhere, 1, 4)?,
        buffer("along", along, parts, 4)?,
    ];
    launch::<E>(client, inputs, base, others, results, pass, shape)
}

fn values(name: &'static str, of: &Handle, size: usize, shape: SsdShape) -> Result<BufferArg, PointwiseError> {
    buffer(name, of, shape.per_head() * shape.head_dim, size)
}

/// `others` are the addend, the states in front, the last state and the sums along; `results` the states, the values, and
/// these times what stays of them.
fn launch<E: Float>(
    client: &Client,
    inputs: PassInputs,
    base: &Handle,
    [addend, in_front, last, along]: [BufferArg; 4],
    [states, of_values, values_until]: [BufferArg; 3],
    pass: Pass,
    shape: SsdShape,
) -> Result<(), PointwiseError> {
    shape.check_delta()?;
    let (cube, size) = (CubeShape::of(client), size_of::<E>());
    let keys = shape.per_head() / shape.heads * shape.groups * shape.state / 8;
    // SAFETY: every cube stays in its columns, and the buffers hold all of them.
    unsafe {
        launch_kernel!(chunk_states<E>, client,
            CubeCount::Static((shape.samples * shape.heads) as u32, shape.state_parts() as u32, 1), cube.dim();
            buffer("keys", inputs.keys, keys, 8 * size)?,
            buffer("corrections", inputs.corrections, shape.per_head() * shape.state / 8, 8 * size)?,
            values("base", base, size, shape)?, buffer("until", inputs.until, shape.per_head(), 4)?,
            buffer("since", inputs.since, shape.per_head(), 4)?, addend, in_front, states, of_values, values_until,
            last, along; shape.samples as u32, shape.chunks() as u32; pass, cube)
    };
    Ok(())
}
