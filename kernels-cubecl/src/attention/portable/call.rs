//! One call of the portable kernels: its checks and the kernels' arguments.
use super::dropout::DropoutParamsLaunch;
use super::mask::{Plan, SizesLaunch};
use crate::attention::{AttentionError, AttentionShape, CallOptions, Gradients, Packed, Saved, Tensor4};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Most units of a cube.
const UNITS: u32 = 64;

/// Largest size of a dimension: sums of two of them fit into i32.
const LARGEST: usize = i32::MAX as usize / 4;

/// Type of Q, K, V, O and their gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// Statistics and accumulators are f64 too.
    F64,
    /// Statistics and accumulators are f32, as for the two below.
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

    /// Bytes of one number of the statistics.
    pub fn statistic_size(self) -> usize {
        self.size().max(4)
    }
}

/// Runs `$body` with `$E` the element type of `$element` and `$A` that of its accumulators.
macro_rules! by_element {
    ($element:expr, $E:ident, $A:ident => $body:expr) => {
        match $element {
            Element::F64 => by_element!(f64, f64, $E, $A => $body),
            Element::F32 => by_element!(f32, f32, $E, $A => $body),
            Element::Bf16 => by_element!(half::bf16, f32, $E, $A => $body),
            Element::F16 => by_element!(half::f16, f32, $E, $A => $body),
        }
    };
    ($element:ty, $sum:ty, $E:ident, $A:ident => $body:expr) => {{
        type $E = $element;
        type $A = $sum;
        $body
    }};
}

pub(super) use by_element;

/// One call: sizes, options, and the kernels' arguments.
pub(super) struct Call<'a> {
    pub client: &'a Client,
    pub element: Element,
    pub shape: &'a AttentionShape,
    pub options: &'a CallOptions<'a>,
    pub scale: f64,
}

impl Call<'_> {
    pub fn check(&self, tensors: &[(&'static str, &Tensor4, [usize; 4])]) -> Result<(), AttentionError> {
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
        if let Some(Packed { query_starts, key_starts, sequences, .. }) = self.options.packed {
            if batch != 1 {
                return Err(AttentionError::PackedBatch { batch });
            }
            bytes("query_starts", query_starts, sequences + 1, 4)?;
            bytes("key_starts", key_starts, sequences + 1, 4)?;
        }
        match self.options.dropout {
            Some(dropout) if !(0.0..1.0).contains(&dropout.p) => Err(AttentionError::Probability(dropout.p)),
            _ => Ok(()),
        }
    }

    pub fn statistics(&self, name: &'static str, handle: &Handle) -> Result<(), AttentionError> {
        bytes(name, handle, self.shape.statistics_len(), self.element.statistic_size())
    }

    pub fn check_forward(&self, [q, k, v, out]: [&Tensor4; 4], lse: &Handle) -> Result<(), AttentionError> {
        let shape = self.shape;
        self.check(&[
            ("q", q, shape.query_shape()),
            ("k", k, shape.key_shape()),
            ("v", v, shape.value_shape()),
            ("out", out, shape.out_shape()),
        ])?;
        self.statistics("lse", lse)
    }

    pub fn check_backward(&self, saved: &Saved, dout: &Tensor4, gradients: &Gradients) -> Result<(), AttentionError> {
        let shape = self.shape;
        self.check_forward([saved.q, saved.k, saved.v, saved.out], saved.lse)?;
        self.check(&[
            ("dout", dout, shape.out_shape()),
            ("dq", gradients.dq, shape.query_shape()),
            ("dk", gradients.dk, shape.key_shape()),
            ("dv", gradients.dv, shape.value_shape()),
        ])
    }

    pub fn plan(&self) -> Plan {
        Plan {
            head_dim: self.shape.head_dim,
            value_dim: self.shape.value_dim,
            causal: self.shape.causal,
            windowed: self.shape.window.is_some(),
            packed: self.options.packed.is_some(),
            dropout: self.options.dropout.is_some(),
        }
    }

    pub fn sizes(&self) -> SizesLaunch {
        let AttentionShape { queries, keys, heads, kv_heads, .. } = *self.shape;
        let first_query = self.options.first_query.unwrap_or(keys as i64 - queries as i64);
        // Positions past these limits see the same keys.
        let first_query = first_query.clamp(-(LARGEST as i64), LARGEST as i64);
        let window = self.shape.window.map_or(0, |window| window.min(LARGEST));
        SizesLaunch::new(
            queries as u32,
            keys as u32,
            (heads / kv_heads) as u32,
            window as u32,
            self.options.packed.map_or(0, |packed| packed.sequences) as u32,
            first_query as i32,
            self.shape.padded_queries() as u32,
        )
    }

    pub fn dropout(&self) -> DropoutParamsLaunch {
        DropoutParamsLaunch::of(self.options.dropout)
    }

    pub fn scale(&self) -> InputScalar {
        by_element!(self.element, _E, A => InputScalar::new(self.scale, A::elem_type_native()))
    }

    /// Start offsets of packed sequences; without packing, a buffer that is not read.
    pub fn starts(&self, unread: &Tensor4) -> [BufferArg; 2] {
        let (handles, len) = match self.options.packed {
            Some(packed) => ([packed.query_starts, packed.key_starts], packed.sequences + 1),
            None => ([&unread.handle; 2], 1),
        };
        // SAFETY: `check` compared the lengths with the sizes of the buffers.
        handles.map(|handle| unsafe { BufferArg::from_raw_parts(handle.clone(), len) })
    }

    pub fn statistic_arg(&self, handle: &Handle) -> BufferArg {
        // SAFETY: `statistics` compared the length with the size of the buffer.
        unsafe { BufferArg::from_raw_parts(handle.clone(), self.shape.statistics_len()) }
    }

    /// A unit for each of `rows` rows of every head.
    pub fn cubes(&self, rows: usize, heads: usize) -> (CubeCount, CubeDim) {
        let units = self.client.properties().hardware.max_units_per_cube.min(UNITS);
        let count = CubeCount::Static((rows as u32).div_ceil(units), heads as u32, self.shape.batch as u32);
        (count, CubeDim::new_1d(units))
    }
}

fn bytes(name: &'static str, handle: &Handle, len: usize, size: usize) -> Result<(), AttentionError> {
    let (found, expected) = (handle.size_in_used(), (len * size) as u64);
    if found < expected { Err(AttentionError::Buffer { name, found, expected }) } else { Ok(()) }
}

pub(super) fn arg(tensor: &Tensor4) -> TensorArg {
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
