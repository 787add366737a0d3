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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    /// Heads of a unit, which have the same angles.
    each: u32,
    /// Units next to each other take vectors next to each other, and tell each other the halves of their pairs: a plane
    /// asks for whole lines of memory. Without, a unit takes pairs.
    lines: bool,
}

impl Cut {
    /// For `half` vectors in half of what is rotated of a head. Whole lines pay with four heads of a unit only.
    fn of(heads: usize, half: usize, plane: u32) -> Self {
        let each = [4, 2].into_iter().find(|each| heads.is_multiple_of(*each)).unwrap_or(1) as u32;
        Self { each, lines: each == 4 && half.is_power_of_two() && 2 * half <= plane as usize }
    }
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

/// Cube `(token, units)`. The units of a head stand side by side, so that all of it is moved at the same time: those of
/// pairs that are rotated, and behind them those of two vectors that are copied. `half` vectors make half of what is
/// rotated of a head, `head` a whole one.
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
) {
    let rest = comptime![head - 2 * half];
    let pairs = comptime![half + rest.div_ceil(2)];
    let item = CUBE_POS_Y * CUBE_DIM_X + UNIT_POS;
    let (nth, unit) = (item / pairs, item % pairs);
    if nth < all_heads {
        let mut low = unit;
        let mut high = unit + half;
        let mut rotates = nth < heads;
        if comptime![rest > 0] {
            // Behind the rotated part.
            low = select(unit < half, low, unit + half);
            high = select(unit < half, high, unit + pairs);
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

/// Cube `(token, units)`, in place. A unit has `each` heads, which divide `heads`, as far apart as there are units for
/// one of each; all are on their way before the first is used. Behind the last head that is read again.
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
    #[comptime] each: u32,
    #[comptime] lines: bool,
) {
    let units = comptime![if lines { 2 * half } else { half }];
    let item = CUBE_POS_Y * CUBE_DIM_X + UNIT_POS;
    let (nth, unit) = (item / units, item % units);
    let apart = heads / each;
    let first = (CUBE_POS_X * all_heads + min(nth, apart - 1)) * head + unit;
    let mut own = Array::<Vec8<E>>::new(comptime![each as usize]);
    let mut others = Array::<Vec8<E>>::new(comptime![if lines { 1 } else { each as usize }]);
    #[unroll]
    for k in 0..comptime![each as usize] {
        let at = first + comptime![k as u32] * apart * head;
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
    if nth < apart {
        #[unroll]
        for k in 0..comptime![each as usize] {
            let at = first + comptime![k as u32] * apart * head;
            x[at as usize] = own[k];
            if comptime![!lines] {
                x[(at + half) as usize] = others[k];
            }
        }
    }
}

/// `out` from `x` and the angles `cos, sin [rows, rotated / 2]`, all of type `E` (2 bytes) and without gaps; without
/// `out` in the place of `x`, where what is not rotated is not touched. Rotates by the negative angles if `back`.
pub fn apply<E: Float>(
    client: &Client,
    x: &Handle,
    (cos, sin): (&Handle, &Handle),
    out: Option<&Handle>,
    shape: RopeShape,
    back: bool,
) -> Result<(), PointwiseError> {
    shape.check()?;
    let RopeShape { rows, batch, heads, all_heads, head_dim, rotated } = shape;
    let (vectors, half, head, bytes) = (shape.len() / 8, rotated / 16, head_dim / 8, 8 * size_of::<E>());
    let x = buffer("x", x, vectors, bytes)?;
    let (cos, sin) = (buffer("cos", cos, rows * half, bytes)?, buffer("sin", sin, rows * half, bytes)?);
    let out = out.map(|out| buffer("out", out, vectors, bytes)).transpose()?;
    let (device, tokens, sign) = (CubeShape::of(client), rows * batch, if back { -1.0 } else { 1.0 });
    let Some(out) = out else {
        let Cut { each, lines } = Cut::of(heads, half, device.plane);
        let items = heads / each as usize * if lines { 2 * half } else { half };
        let cube = device.fitting(items);
        // SAFETY: every unit stays in its token and its row of angles and writes only what no other one uses, and the
        // buffers hold all.
        unsafe {
            rotate_in_place::launch_unchecked::<E>(
                client,
                cube.rows(tokens, items),
                cube.dim(),
                x,
                cos,
                sin,
                batch as u32,
                heads as u32,
                all_heads as u32,
                sign,
                half as u32,
                head as u32,
                each,
                lines,
            )
        };
        return Ok(());
    };
    let items = all_heads * (half + (head - 2 * half).div_ceil(2));
    let cube = device.fitting(items);
    // SAFETY: every unit stays in its token and its row of angles, and the buffers hold all.
    unsafe {
        rotate::launch_unchecked::<E>(
            client,
            cube.rows(tokens, items),
            cube.dim(),
            x,
            cos,
            sin,
            out,
            batch as u32,
            heads as u32,
            all_heads as u32,
            sign,
            half as u32,
            head as u32,
        )
    };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_lines_need_heads_in_fours_and_units_of_one_plane() {
        let cut = |heads, half, plane| (Cut::of(heads, half, plane).each, Cut::of(heads, half, plane).lines);
        for (heads, half, expected) in [
            (40, 8, (4, true)),
            (128, 4, (4, true)),
            (8, 16, (4, true)),
            (8, 32, (4, false)),
            (8, 5, (4, false)),
            (6, 8, (2, false)),
            (5, 8, (1, false)),
            (1, 4, (1, false)),
        ] {
            assert_eq!(cut(heads, half, 32), expected, "{heads} heads, {half} vectors");
        }
        assert_eq!(cut(40, 8, 1), (4, false));
    }
}
