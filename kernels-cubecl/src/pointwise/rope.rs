//! Rotary position embedding ("rotate half") of the first heads of a packed projection, or of their first features.
use super::{CubeShape, PointwiseError, Vec8, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Longest head.
const LONGEST: usize = 1024;

/// What a call works on: `x [rows, batch, all_heads, head_dim]`, of whose heads the first `heads` are rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RopeShape {
    /// Sequence positions.
    pub rows: usize,
    /// Sequences.
    pub batch: usize,
    /// Heads to rotate.
    pub heads: usize,
    /// All heads.
    pub all_heads: usize,
    /// Length of a head.
    pub head_dim: usize,
    /// Its first features, which are rotated: all of them, or the rotated part of latent attention's heads.
    pub rotated: usize,
}

impl RopeShape {
    /// Whether there is a kernel for this shape.
    pub fn has_kernel(&self) -> bool {
        self.check().is_ok()
    }

    fn check(&self) -> Result<(), PointwiseError> {
        check("head_dim", self.head_dim, 8, LONGEST)?;
        check("rotated features", self.rotated, 16, self.head_dim)?;
        check("all_heads", self.all_heads, 1, u16::MAX as usize)?;
        check("heads", self.heads, 1, self.all_heads)?;
        check("rows × batch", self.rows * self.batch, 1, i32::MAX as usize / (self.all_heads * self.head_dim / 8))
    }

    /// Elements of `x`.
    fn len(&self) -> usize {
        self.rows * self.batch * self.all_heads * self.head_dim
    }
}

/// Cube `(token, items)`: an item is a pair of vectors to rotate or a vector to copy. `half` vectors make half of what is rotated
/// of a head, `head` a whole one; `copies` is whether there are such vectors.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn rotate<E: Float>(
    x: &[Vec8<E>],
    cos: &[Vec8<E>],
    sin: &[Vec8<E>],
    out: &mut [Vec8<E>],
    batch: u32,
    heads: u32,
    all_heads: u32,
    sign: f32,
    #[comptime] half: u32,
    #[comptime] head: u32,
    #[comptime] copies: bool,
) {
    let rest = comptime![head - 2 * half];
    let item = CUBE_POS_Y * CUBE_DIM_X + UNIT_POS;
    let token = CUBE_POS_X * all_heads * head;
    let pairs = heads * half;
    if item < pairs {
        let column = item % half;
        let first = (token + (item / half) * head + column) as usize;
        let second = first + comptime![half as usize];
        let angle = ((CUBE_POS_X / batch) * half + column) as usize;
        let (a, b, c, s) = (x[first], x[second], cos[angle], sin[angle]);
        let mut low = Vec8::<E>::empty();
        let mut high = Vec8::<E>::empty();
        #[unroll]
        for i in 0..8usize {
            let (a, b) = (f32::cast_from(a.extract(i)), f32::cast_from(b.extract(i)));
            let (c, s) = (f32::cast_from(c.extract(i)), f32::cast_from(s.extract(i)) * sign);
            low.insert(i, E::cast_from(a * c - b * s));
            high.insert(i, E::cast_from(b * c + a * s));
        }
        out[first] = low;
        out[second] = high;
    } else {
        if copies {
            let item = item - pairs;
            let inside = heads * rest;
            if item < inside + (all_heads - heads) * head {
                // Behind the heads' rotated parts, then the other heads.
                let mut at = token + heads * comptime![2 * half] + item;
                if comptime![rest > 0] {
                    if item < inside {
                        at = token + (item / rest) * head + comptime![2 * half] + item % rest;
                    }
                }
                out[at as usize] = x[at as usize];
            }
        }
    }
}

/// `out` from `x` and the angles `cos, sin [rows, rotated / 2]`, all of type `E` (2 bytes) and without gaps; without `out` in the
/// place of `x`, where what is not rotated is not touched. Rotates by the negative angles if `back`.
pub fn apply<E: Float>(
    client: &Client,
    x: &Handle,
    (cos, sin): (&Handle, &Handle),
    out: Option<&Handle>,
    shape: RopeShape,
    back: bool,
) -> Result<(), PointwiseError> {
    shape.check()?;
    let (vectors, half, head) = (shape.len() / 8, shape.rotated / 16, shape.head_dim / 8);
    let x = buffer("x", x, vectors, 8 * size_of::<E>())?;
    let (out, copies) = match out {
        Some(out) => (buffer("out", out, vectors, 8 * size_of::<E>())?, true),
        None => (BufferArg::alias(0, vectors), false),
    };
    let (cos, sin) = (
        buffer("cos", cos, shape.rows * half, 8 * size_of::<E>())?,
        buffer("sin", sin, shape.rows * half, 8 * size_of::<E>())?,
    );
    let items = match copies {
        true => shape.heads * (head - half) + (shape.all_heads - shape.heads) * head,
        false => shape.heads * half,
    };
    let cube = CubeShape::of(client);
    // SAFETY: every unit stays in its token and its row of angles and reads what it overwrites before, and the buffers hold all.
    unsafe {
        rotate::launch_unchecked::<E>(
            client,
            cube.rows(shape.rows * shape.batch, items),
            cube.dim(),
            x,
            cos,
            sin,
            out,
            shape.batch as u32,
            shape.heads as u32,
            shape.all_heads as u32,
            if back { -1.0 } else { 1.0 },
            half as u32,
            head as u32,
            copies,
        )
    };
    Ok(())
}
