//! Rotary position embedding ("rotate half") of the first heads of a packed projection, or of their first features.
use super::{CubeShape, PointwiseError, Vec8, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Longest head.
const LONGEST: usize = 1024;

/// Sizes of a call: `x [rows, batch, all_heads, head_dim]`; the first `heads` heads are rotated.
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
    /// Its first features, which are rotated: all of them, or `rope_dim` of latent attention's heads.
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

/// Units of a head, of two vectors each: pairs that are rotated, then those that are copied.
fn pairs(half: u32, head: u32, copies: bool) -> u32 {
    if copies { half + (head - 2 * half).div_ceil(2) } else { half }
}

/// The pairs of numbers of `a` and `b`, turned by angles with these cosines and sines, or back for `sign` −1.
#[cube]
pub(crate) fn turn<E: Float>(a: Vec8<E>, b: Vec8<E>, cos: Vec8<E>, sin: Vec8<E>, sign: f32) -> (Vec8<E>, Vec8<E>) {
    let mut lower = Vec8::<E>::empty();
    let mut higher = Vec8::<E>::empty();
    #[unroll]
    for i in 0..8usize {
        let (a, b) = (f32::cast_from(a.extract(i)), f32::cast_from(b.extract(i)));
        let (c, s) = (f32::cast_from(cos.extract(i)), f32::cast_from(sin.extract(i)) * sign);
        lower.insert(i, E::cast_from(a * c - b * s));
        higher.insert(i, E::cast_from(b * c + a * s));
    }
    (lower, higher)
}

/// Cube `(token, units)`. The units of a head are neighbours, so that all of it is moved at the same time. `half`
/// vectors are half of a head's rotated features, `head` a whole head; `copies` says whether the other features are
/// copied.
#[cube(launch_unchecked)]
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
    let (pairs, rest) = comptime![(pairs(half, head, copies), head - 2 * half)];
    let item = CUBE_POS_Y * CUBE_DIM_X + UNIT_POS;
    let (nth, unit) = (item / pairs, item % pairs);
    let mut taken = heads;
    if copies {
        taken = all_heads;
    }
    if nth < taken {
        let mut low = unit;
        let mut high = unit + half;
        let mut rotates = nth < heads;
        if comptime![copies && rest > 0] {
            // After the rotated features.
            low = select(unit < half, low, unit + half);
            high = select(unit < half, high, unit + comptime![half + rest.div_ceil(2)]);
            rotates = rotates && unit < half;
        }
        let mut has_high = true;
        if comptime![rest % 2 == 1] {
            has_high = high < head;
        }
        let place = (CUBE_POS_X * all_heads + nth) * head;
        let first = (place + low) as usize;
        let second = (place + select(has_high, high, low)) as usize;
        let (a, b) = (x[first], x[second]);
        let mut lower = a;
        let mut higher = b;
        if rotates {
            let angle = ((CUBE_POS_X / batch) * half + unit) as usize;
            let turned = turn::<E>(a, b, cos[angle], sin[angle], sign);
            lower = turned.0;
            higher = turned.1;
        }
        out[first] = lower;
        if has_high {
            out[second] = higher;
        }
    }
}

/// `out` from `x` and the angles `cos, sin [rows, rotated / 2]`, all of type `E` (2 bytes) and without gaps. Without
/// `out` it rotates `x` in place, and does not access the other features. Rotates by the negative angles if `back`.
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
    let taken = if copies { shape.all_heads } else { shape.heads };
    let items = taken * pairs(half as u32, head as u32, copies) as usize;
    let cube = CubeShape::of(client).fitting(items);
    // SAFETY: every unit stays in its token and its row of angles and reads each vector before it overwrites it, and
    // the buffers hold all.
    unsafe {
        launch_kernel!(rotate<E>, client, cube.rows(shape.rows * shape.batch, items), cube.dim();
            x, cos, sin, out;
            shape.batch as u32, shape.heads as u32, shape.all_heads as u32, if back { -1.0 } else { 1.0 };
            half as u32, head as u32, copies)
    };
    Ok(())
}
