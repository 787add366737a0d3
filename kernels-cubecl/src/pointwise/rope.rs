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

/// How the heads of a token are shared out among units, in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Plan {
    /// Heads of a unit, which have the same angles.
    pub each: u32,
    /// Units next to each other take vectors next to each other, and tell each other the halves of their pairs: a plane asks for
    /// whole lines of memory. Without, a unit takes pairs.
    pub lines: bool,
}

impl Plan {
    /// Whether the units of a plane can tell each other their vectors, of which `half` are half of what is rotated of a head.
    fn in_lines(self, cube: CubeShape, half: u32) -> bool {
        self.lines && half.is_power_of_two() && 2 * half <= cube.plane
    }
}

/// Units of a head, of two vectors each: pairs that are rotated, and behind them those that are copied.
fn pairs(half: u32, head: u32, copies: bool) -> u32 {
    if copies { half + (head - 2 * half).div_ceil(2) } else { half }
}

/// Two vectors rotated.
#[cube]
fn turned<E: Float>(a: Vec8<E>, b: Vec8<E>, cos: Vec8<E>, sin: Vec8<E>, sign: f32) -> (Vec8<E>, Vec8<E>) {
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

/// Cube `(token, units)`. The units of a head stand side by side, so that all of it is moved at the same time. `half` vectors
/// make half of what is rotated of a head, `head` a whole one; `copies` is whether the others are copied.
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
            // Behind the rotated part.
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
            let both = turned(a, b, cos[angle], sin[angle], sign);
            lower = both.0;
            higher = both.1;
        }
        out[first] = lower;
        if has_high {
            out[second] = higher;
        }
    }
}

/// The vector of the unit `half` places away, that of the other half. All units of the plane take part.
#[cube]
fn from_other_half<E: Float>(value: Vec8<E>, #[comptime] half: u32) -> Vec8<E> {
    let words = Vector::<u32, Const<4>>::reinterpret(value);
    let mut other = Vector::<u32, Const<4>>::empty();
    #[unroll]
    for i in 0..4usize {
        other.insert(i, plane_shuffle_xor(words.extract(i), half));
    }
    Vec8::<E>::reinterpret(other)
}

/// Cube `(token, units)`, in place. A unit has `each` heads, as far apart as there are units for one of each; all are on their
/// way before the first is used, and behind the last head that is read again.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn rotate_in_place<E: Float>(
    x: &mut [Vec8<E>],
    cos: &[Vec8<E>],
    sin: &[Vec8<E>],
    batch: u32,
    heads: u32,
    all_heads: u32,
    sign: f32,
    #[comptime] half: u32,
    #[comptime] head: u32,
    #[comptime] lines: bool,
    #[comptime] each: u32,
) {
    let units = comptime![if lines { 2 * half } else { half }];
    let item = CUBE_POS_Y * CUBE_DIM_X + UNIT_POS;
    let (nth, unit) = (item / units, item % units);
    let apart = (heads + comptime![each - 1]) / each;
    let first = CUBE_POS_X * all_heads * head + unit;
    let mut own = Array::<Vec8<E>>::new(comptime![each as usize]);
    let mut others = Array::<Vec8<E>>::new(comptime![each as usize]);
    #[unroll]
    for k in 0..comptime![each as usize] {
        let at = first + min(nth + comptime![k as u32] * apart, heads - 1) * head;
        own[k] = x[at as usize];
        if comptime![!lines] {
            others[k] = x[(at + half) as usize];
        }
    }
    let angle = ((CUBE_POS_X / batch) * half + unit % half) as usize;
    let (cos, sin) = (cos[angle], sin[angle]);
    #[unroll]
    for k in 0..comptime![each as usize] {
        if comptime![lines] {
            // The upper half gets what the lower one would by the opposite angle. All of the plane are here still.
            let other = from_other_half(own[k], half);
            own[k] = turned(own[k], other, cos, sin, select(unit < half, sign, -sign)).0;
        } else {
            let both = turned(own[k], others[k], cos, sin, sign);
            own[k] = both.0;
            others[k] = both.1;
        }
    }
    #[unroll]
    for k in 0..comptime![each as usize] {
        let head_there = nth + comptime![k as u32] * apart;
        if nth < apart && head_there < heads {
            let at = first + head_there * head;
            x[at as usize] = own[k];
            if comptime![!lines] {
                x[(at + half) as usize] = others[k];
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
    let taken = if copies { shape.all_heads } else { shape.heads };
    let items = taken * pairs(half as u32, head as u32, copies) as usize;
    let cube = CubeShape::of(client).fitting(items);
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

/// [`apply`] in the place of `x`, by a plan.
///
/// # Errors
/// As [`apply`].
pub fn apply_planned<E: Float>(
    client: &Client,
    x: &Handle,
    (cos, sin): (&Handle, &Handle),
    shape: RopeShape,
    back: bool,
    plan: Plan,
) -> Result<(), PointwiseError> {
    shape.check()?;
    let (vectors, half, head) = (shape.len() / 8, shape.rotated / 16, shape.head_dim / 8);
    let lines = plan.in_lines(CubeShape::of(client), half as u32);
    let items = shape.heads.div_ceil(plan.each as usize) * if lines { 2 * half } else { half };
    let cube = CubeShape::of(client).fitting(items);
    let x = buffer("x", x, vectors, 8 * size_of::<E>())?;
    let (cos, sin) = (
        buffer("cos", cos, shape.rows * half, 8 * size_of::<E>())?,
        buffer("sin", sin, shape.rows * half, 8 * size_of::<E>())?,
    );
    // SAFETY: every unit stays in its token and its row of angles and reads what it overwrites before, and the buffers hold all.
    unsafe {
        rotate_in_place::launch_unchecked::<E>(
            client,
            cube.rows(shape.rows * shape.batch, items),
            cube.dim(),
            x,
            cos,
            sin,
            shape.batch as u32,
            shape.heads as u32,
            shape.all_heads as u32,
            if back { -1.0 } else { 1.0 },
            half as u32,
            head as u32,
            lines,
            plan.each,
        )
    };
    Ok(())
}
