//! What is between the GEMMs of Mamba-2's recurrence in chunks (Dao, Gu, arXiv 2405.21060, section 6), forward and
//! backward: step sizes and decays, operands in the GEMMs' order, masked scores, states between chunks, and sums.
//!
//! Orders of dimensions, with `b` sequences, `c` chunks, `g` groups, `h` heads, `l` positions of a chunk, `p` features of
//! a head, and `n` features of the state:
//! - as the layer has it, `[s, b, features]`;
//! - a number for each position and head, `[b, c, h, l]`, fp32;
//! - by head, `[b, c, h, l, p]`, and likewise B and C by group, `[b, c, g, l, n]`;
//! - by column, `[b, c, g, l, h/g p]`, and states `[b, c, g, n, h/g p]`.
pub mod arrange;
pub mod combine;
pub mod pass;
pub mod steps;
pub mod steps_gradient;
pub mod weights;
pub mod weights_gradient;

use super::{CubeShape, MOST, PointwiseError, Vec8, buffer, check};
use crate::hopper::ptx;
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Four numbers.
pub type Vec4<E> = Vector<E, Const<4>>;

/// Sizes of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SsdShape {
    /// Positions of a sequence.
    pub seq: usize,
    /// Sequences.
    pub samples: usize,
    /// Heads.
    pub heads: usize,
    /// Groups of heads that share B and C.
    pub groups: usize,
    /// Features of a head.
    pub head_dim: usize,
    /// Features of a state.
    pub state: usize,
    /// Positions of a chunk.
    pub chunk: usize,
}

impl SsdShape {
    /// Chunks of a sequence, of which the last one is padded.
    pub fn chunks(&self) -> usize {
        self.seq.div_ceil(self.chunk)
    }

    /// Features of all heads.
    pub fn inner(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Features of what is convolved: x, B and C.
    pub fn width(&self) -> usize {
        self.inner() + 2 * self.groups * self.state
    }

    /// Numbers `[b, c, h, l]`.
    pub fn per_head(&self) -> usize {
        self.samples * self.chunks() * self.heads * self.chunk
    }

    /// Numbers of a state of all heads, times chunks.
    pub fn states(&self) -> usize {
        self.samples * self.chunks() * self.heads * self.head_dim * self.state
    }

    /// Masked scores of all heads.
    pub fn weights(&self) -> usize {
        self.per_head() * self.chunk
    }

    /// Parts of the sums over the positions that see a position, and of those over a head's state.
    pub fn parts(&self, client: &Client) -> [usize; 2] {
        let cube = CubeShape::of(client);
        [self.chunk.div_ceil(cube.planes()), (self.state * self.head_dim / 4).div_ceil(cube.units as usize)]
    }

    /// Whether there are kernels for this shape.
    pub fn has_kernel(&self) -> bool {
        self.check().is_ok()
    }

    pub(in crate::pointwise) fn check(&self) -> Result<(), PointwiseError> {
        let lanes = self.head_dim / 8;
        check("features of a head", self.head_dim, 8, 256)?;
        check("features of a state", self.state, 8, 1024)?;
        check("positions of a chunk", self.chunk, 8, 256)?;
        // Sums over blocks take four heads at a time.
        check("heads", self.heads, 4, 65_535)?;
        check("heads of groups", self.heads, self.groups.max(1), 65_535)?;
        check("positions", self.seq, 1, 1 << 24)?;
        let most = [self.weights(), self.states(), self.seq * self.samples * self.width()];
        if !lanes.is_power_of_two() || self.groups == 0 || most.into_iter().max() > Some(MOST) {
            return Err(PointwiseError::Shape { shape: format!("{self:?}") });
        }
        Ok(())
    }

    pub(in crate::pointwise) fn form(&self, divided: bool) -> Form {
        let of = |size: usize| size as u32;
        Form {
            heads: of(self.heads),
            groups: of(self.groups),
            head_dim: of(self.head_dim),
            state: of(self.state),
            chunk: of(self.chunk),
            divided,
        }
    }
}

/// Sizes of the model, at compile time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Form {
    /// Heads.
    pub heads: u32,
    /// Groups of heads.
    pub groups: u32,
    /// Features of a head.
    pub head_dim: u32,
    /// Features of a state.
    pub state: u32,
    /// Positions of a chunk.
    pub chunk: u32,
    /// There are several documents.
    pub divided: bool,
}

impl Form {
    pub(in crate::pointwise) fn serves(self) -> u32 {
        self.heads / self.groups
    }

    /// Features of the heads of a group.
    fn columns(self) -> u32 {
        self.serves() * self.head_dim
    }
}

/// `ages`, fp32 `[s, b]`, or a buffer in its place if there is one document.
pub(in crate::pointwise) fn ages_of(
    ages: Option<&Handle>,
    other: &Handle,
    shape: SsdShape,
) -> Result<BufferArg, PointwiseError> {
    match ages {
        Some(ages) => buffer("ages", ages, shape.seq * shape.samples, 4),
        None => buffer("ages", other, 1, 4),
    }
}

/// `eˣ`.
#[cube]
pub(in crate::pointwise) fn exp(x: f32) -> f32 {
    ptx::exp2(x * comptime![core::f32::consts::LOG2_E])
}

/// Whether position `at` of a chunk sees one of it that is `distance` before: it is of the same document. `t` is the
/// position in the sequence; padding sees everything.
#[cube]
pub(in crate::pointwise) fn sees(
    ages: &[f32],
    t: u32,
    sample: u32,
    seq: u32,
    samples: u32,
    distance: u32,
    #[comptime] form: Form,
) -> bool {
    let mut sees = true;
    if comptime![form.divided] {
        if t < seq {
            sees = ages[(t * samples + sample) as usize] >= f32::cast_from(distance);
        }
    }
    sees
}
