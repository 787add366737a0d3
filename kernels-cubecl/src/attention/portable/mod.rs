//! Flash attention for every CubeCL runtime: no shared memory, no planes, no matrix units, any sizes and strides, in
//! f64, f32, bf16 and f16 (sums in f64 and f32). Slow: a unit works through a row on its own. Never holds the scores.
mod delta;
pub mod draw;
pub mod forward;
pub mod key_gradient;
pub mod mma;
pub mod query_gradient;
mod row;
pub mod sight;

use super::{AttentionError, AttentionShape, Extras, Gradients, Packed, Saved, Tensor4};
use cubecl::prelude::*;
use cubecl::server::Handle;
use draw::DrawsLaunch;
use half::{bf16, f16};
use sight::{Plan, SizesLaunch};

/// Most units of a cube.
const UNITS: u32 = 64;

/// Largest size of a dimension: sums of two are i32.
const LARGEST: usize = i32::MAX as usize / 4;

/// The type of queries, keys, values, output and their gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// Statistics and sums are f64 too.
    F64,
    /// Statistics and sums are f32, as for the two below.
    F32,
    /// Rounded when stored.
    Bf16,
    /// Rounded when stored.
    F16,
}

impl Element {
    /// Bytes.
    pub fn size(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// Bytes of a number of the statistics.
    pub fn statistic_size(self) -> usize {
        self.size().max(4)
    }
}

/// Runs `$body` with `$E` the element type of `$element` and `$A` that of its sums.
macro_rules! by_element {
    ($element:expr, $E:ident, $A:ident => $body:expr) => {
        match $element {
            Element::F64 => by_element!(f64, f64, $E, $A => $body),
            Element::F32 => by_element!(f32, f32, $E, $A => $body),
            Element::Bf16 => by_element!(bf16, f32, $E, $A => $body),
            Element::F16 => by_element!(f16, f32, $E, $A => $body),
        }
    };
    ($element:ty, $sum:ty, $E:ident, $A:ident => $body:expr) => {{
        type $E = $element;
        type $A = $sum;
        $body
    }};
}

/// One call: its sizes and what its kernels are told.
struct Call<'a> {
    client: &'a Client,
    element: Element,
    shape: &'a AttentionShape,
    extras: &'a Extras<'a>,
    scale: f64,
}

impl Call<'_> {
    fn check(&self, tensors: &[(&'static str, &Tensor4, [usize; 4])]) -> Result<(), AttentionError> {
        let AttentionShape { batch, heads, kv_heads, queries, keys, head_dim, value_dim, window, .. } = *self.shape;
        let sizes = [
            ("batch", batch),
            ("heads", heads),
            ("kv_heads", kv_heads),
            ("queries", queries),
            ("keys", keys),
            ("head_dim", head_dim),
            ("value_dim", value_dim),
        ];
        let zero = sizes.into_iter().chain([("window", window.unwrap_or(1))]).find(|(_, size)| *size == 0);
        if let Some((name, _)) = zero {
            return Err(AttentionError::Empty(name));
        }
        if let Some((name, size)) = sizes.into_iter().find(|(_, size)| *size > LARGEST) {
            return Err(AttentionError::TooLong { name, size, most: LARGEST });
        }
        if !heads.is_multiple_of(kv_heads) {
            return Err(AttentionError::Heads { heads, kv_heads });
        }
        for (name, tensor, expected) in tensors {
            if tensor.shape != *expected {
                return Err(AttentionError::Shape { name, found: tensor.shape, expected: *expected });
            }
            bytes(name, &tensor.handle, tensor.extent(), self.element.size())?;
        }
        if let Some(Packed { query_starts, key_starts, sequences, .. }) = self.extras.packed {
            if batch != 1 {
                return Err(AttentionError::PackedBatch { batch });
            }
            bytes("query_starts", query_starts, sequences + 1, 4)?;
            bytes("key_starts", key_starts, sequences + 1, 4)?;
        }
        match self.extras.dropout {
            Some(dropout) if !(0.0..1.0).contains(&dropout.p) => Err(AttentionError::Probability(dropout.p)),
            _ => Ok(()),
        }
    }

    fn statistics(&self, name: &'static str, handle: &Handle) -> Result<(), AttentionError> {
        bytes(name, handle, self.shape.statistics_len(), self.element.statistic_size())
    }

    fn check_forward(&self, [q, k, v, out]: [&Tensor4; 4], lse: &Handle) -> Result<(), AttentionError> {
        let shape = self.shape;
        self.check(&[
            ("q", q, shape.query_shape()),
            ("k", k, shape.key_shape()),
            ("v", v, shape.value_shape()),
            ("out", out, shape.out_shape()),
        ])?;
        self.statistics("lse", lse)
    }

    fn check_backward(
        &self,
        saved: &Saved,
        out_gradient: &Tensor4,
        gradients: &Gradients,
    ) -> Result<(), AttentionError> {
        let shape = self.shape;
        self.check_forward([saved.q, saved.k, saved.v, saved.out], saved.lse)?;
        self.check(&[
            ("out_gradient", out_gradient, shape.out_shape()),
            ("q_gradient", gradients.q, shape.query_shape()),
            ("k_gradient", gradients.k, shape.key_shape()),
            ("v_gradient", gradients.v, shape.value_shape()),
        ])
    }

    fn plan(&self) -> Plan {
        Plan {
            head_dim: self.shape.head_dim,
            value_dim: self.shape.value_dim,
            causal: self.shape.causal,
            windowed: self.shape.window.is_some(),
            packed: self.extras.packed.is_some(),
            dropout: self.extras.dropout.is_some(),
        }
    }

    fn sizes(&self) -> SizesLaunch {
        let AttentionShape { queries, keys, heads, kv_heads, .. } = *self.shape;
        let first_query = self.extras.first_query.unwrap_or(keys as i64 - queries as i64);
        // Beyond these all positions look alike.
        let first_query = first_query.clamp(-(LARGEST as i64), LARGEST as i64);
        let window = self.shape.window.map_or(0, |window| window.min(LARGEST));
        SizesLaunch::new(
            queries as u32,
            keys as u32,
            (heads / kv_heads) as u32,
            window as u32,
            self.extras.packed.map_or(0, |packed| packed.sequences) as u32,
            first_query as i32,
            self.shape.padded_queries() as u32,
        )
    }

    fn draws(&self) -> DrawsLaunch {
        DrawsLaunch::of(self.extras.dropout)
    }

    fn scale(&self) -> InputScalar {
        by_element!(self.element, _E, A => InputScalar::new(self.scale, A::elem_type_native()))
    }

    /// Starts of the sequences; without any a buffer that is not read.
    fn starts(&self, unread: &Tensor4) -> [BufferArg; 2] {
        let (handles, len) = match self.extras.packed {
            Some(packed) => ([packed.query_starts, packed.key_starts], packed.sequences + 1),
            None => ([&unread.handle; 2], 1),
        };
        // SAFETY: `check` compared the lengths with the sizes of the buffers.
        handles.map(|handle| unsafe { BufferArg::from_raw_parts(handle.clone(), len) })
    }

    fn statistic_arg(&self, handle: &Handle) -> BufferArg {
        // SAFETY: `statistics` compared the length with the size of the buffer.
        unsafe { BufferArg::from_raw_parts(handle.clone(), self.shape.statistics_len()) }
    }

    /// A unit for each of `rows` rows of every head.
    fn cubes(&self, rows: usize, heads: usize) -> (CubeCount, CubeDim) {
        let units = self.client.properties().hardware.max_units_per_cube.min(UNITS);
        let count = CubeCount::Static((rows as u32).div_ceil(units), heads as u32, self.shape.batch as u32);
        (count, CubeDim::new_1d(units))
    }
}

fn bytes(name: &'static str, handle: &Handle, len: usize, size: usize) -> Result<(), AttentionError> {
    let (found, expected) = (handle.size_in_used(), (len * size) as u64);
    if found < expected { Err(AttentionError::Buffer { name, found, expected }) } else { Ok(()) }
}

fn arg(tensor: &Tensor4) -> TensorArg {
    let ([seq, batch, heads, length], [by_row, by_batch, by_head]) = (tensor.shape, tensor.strides);
    // SAFETY: `Call::check` compared the extent of the tensor with the size of its buffer.
    unsafe {
        TensorArg::from_raw_parts(
            tensor.handle.clone(),
            [by_row, by_batch, by_head, 1].into(),
            [seq, batch, heads, length].into(),
        )
    }
}

/// `out = softmax(q kᵀ · scale) v` and the log-sum-exp of the scaled scores, `lse` `[batch, heads,
/// shape.padded_queries()]` in f32 (f64 for f64). A query that sees no key gets zeros and -∞. `extras.element` is not read.
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

/// The gradients of `q`, `k` and `v`, given that of the output. Every sum is taken in one order. For ring attention `out`
/// and `lse` are those of the whole ring.
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
