//! Keys of latent attention: features that all heads share, rotated, in front of those of a head's own, which lie
//! beside its value.
use super::norm::backward::half;
use super::{CubeShape, F32x4, PointwiseError, Vec8, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Most features of a part of a head.
const LONGEST: usize = 1024;

/// What a call works on: `kv [tokens, heads, own + value]` and `shared [tokens, rotated]` make keys
/// `[tokens, heads, rotated + own]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentShape {
    /// Positions of all sequences.
    pub tokens: usize,
    /// Tokens in a row that have the same angles.
    pub batch: usize,
    /// Heads.
    pub heads: usize,
    /// Features of a key that all heads share, which are rotated.
    pub rotated: usize,
    /// Features of a key that a head has for itself.
    pub own: usize,
    /// Features of a value.
    pub value: usize,
}

impl LatentShape {
    /// Whether there are kernels for this shape.
    pub fn has_kernel(&self) -> bool {
        self.check().is_ok()
    }

    fn check(&self) -> Result<(), PointwiseError> {
        check("rotated features", self.rotated, 16, LONGEST)?;
        check("own features", self.own, 8, LONGEST)?;
        check("value features", self.value, 8, LONGEST)?;
        check("heads", self.heads, 1, u16::MAX as usize)?;
        check("tokens of the same angles", self.batch, 1, self.tokens)?;
        let token = self.heads * (self.rotated + self.own).max(self.own + self.value) / 8;
        check("tokens", self.tokens, self.batch, i32::MAX as usize / token)
    }

    /// Vectors of all tokens' keys, of keys and values as they come, of the shared key, and of one table of angles.
    fn vectors(&self) -> [usize; 4] {
        let heads = self.tokens * self.heads;
        [
            heads * (self.rotated + self.own) / 8,
            heads * (self.own + self.value) / 8,
            self.tokens * self.rotated / 8,
            self.tokens / self.batch * self.rotated / 16,
        ]
    }

    fn parts(&self) -> Parts {
        let [half, own, value] = [self.rotated / 16, self.own / 8, self.value / 8].map(|vectors| vectors as u32);
        Parts { half, own, value }
    }
}

/// Vectors of a head's parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Parts {
    /// Half of what is rotated.
    pub half: u32,
    /// A head's own part of a key.
    pub own: u32,
    /// A value.
    pub value: u32,
}

impl Parts {
    /// Units side by side on one column of the shared key, each with every so manyth head.
    fn lanes(self, cube: CubeShape) -> u32 {
        (cube.units / (2 * self.half)).max(1)
    }
}

/// Cube `(token, items)`: an item is a vector of a key; `vectors` make the keys of a token.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn join_keys<E: Float>(
    kv: &[Vec8<E>],
    shared: &[Vec8<E>],
    cos: &[Vec8<E>],
    sin: &[Vec8<E>],
    keys: &mut [Vec8<E>],
    vectors: u32,
    batch: u32,
    #[comptime] parts: Parts,
) {
    let (half, front, length) = comptime![(parts.half, 2 * parts.half, 2 * parts.half + parts.own)];
    let item = CUBE_POS_Y * CUBE_DIM_X + UNIT_POS;
    if item < vectors {
        let column = item % length;
        let mut result = Vec8::<E>::empty();
        if column < front {
            let first = CUBE_POS_X * front;
            let angle = ((CUBE_POS_X / batch) * half + column % half) as usize;
            let (a, b) = (shared[(first + column) as usize], shared[(first + (column + half) % front) as usize]);
            let (c, s, sign) = (cos[angle], sin[angle], select(column < half, -1.0f32, 1.0f32));
            #[unroll]
            for i in 0..8usize {
                let (a, b) = (f32::cast_from(a.extract(i)), f32::cast_from(b.extract(i)));
                let (c, s) = (f32::cast_from(c.extract(i)), f32::cast_from(s.extract(i)) * sign);
                result.insert(i, E::cast_from(a * c + b * s));
            }
        } else {
            let head = CUBE_POS_X * (vectors / length) + item / length;
            result = kv[(head * comptime![parts.own + parts.value] + column - front) as usize];
        }
        keys[(CUBE_POS_X * vectors + item) as usize] = result;
    }
}

/// A cube for each token. Of a column of the shared key a unit adds up every so manyth head, and the units' sums are
/// added up in their order.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub fn part_gradients<E: Float>(
    keys: &[Vec8<E>],
    values: &[Vec8<E>],
    cos: &[Vec8<E>],
    sin: &[Vec8<E>],
    kv: &mut [Vec8<E>],
    shared: &mut [Vec8<E>],
    heads: u32,
    batch: u32,
    #[comptime] parts: Parts,
    #[comptime] cube: CubeShape,
) {
    let (half_front, front, length) = comptime![(parts.half, 2 * parts.half, 2 * parts.half + parts.own)];
    let (own, value, both) = comptime![(parts.own, parts.value, parts.own + parts.value)];
    let (lanes, all) = comptime![(parts.lanes(cube), parts.lanes(cube) * 2 * parts.half)];
    let first = CUBE_POS_X * heads;
    let mut lines = Shared::<[F32x4]>::new_slice(comptime![2 * all as usize]);
    let mut totals = Shared::<[F32x4]>::new_slice(comptime![2 * front as usize]);
    let mut task = UNIT_POS;
    while task < all {
        let mut sums = Array::<f32>::new(8usize);
        #[unroll]
        for i in 0..8usize {
            sums[i] = 0.0f32;
        }
        let mut head = task / front;
        while head < heads {
            let slope = keys[((first + head) * length + task % front) as usize];
            #[unroll]
            for i in 0..8usize {
                sums[i] = sums[i] + f32::cast_from(slope.extract(i));
            }
            head += lanes;
        }
        lines[task as usize] = half(&mut sums, 0usize);
        lines[(task + all) as usize] = half(&mut sums, 4usize);
        task += CUBE_DIM_X;
    }
    let mut item = UNIT_POS;
    while item < heads * own {
        let (head, column) = (first + item / own, item % own);
        kv[(head * both + column) as usize] = keys[(head * length + front + column) as usize];
        item += CUBE_DIM_X;
    }
    let mut item = UNIT_POS;
    while item < heads * value {
        let (head, column) = (first + item / value, item % value);
        kv[(head * both + own + column) as usize] = values[(head * value + column) as usize];
        item += CUBE_DIM_X;
    }
    sync_cube();
    let mut task = UNIT_POS;
    while task < comptime![2 * front] {
        let start = (task / front) * all + task % front;
        let mut total = lines[start as usize];
        #[unroll]
        for lane in 1..lanes {
            total += lines[(start + comptime![lane * front]) as usize];
        }
        totals[task as usize] = total;
        task += CUBE_DIM_X;
    }
    sync_cube();
    let mut column = UNIT_POS;
    while column < front {
        let angle = ((CUBE_POS_X / batch) * half_front + column % half_front) as usize;
        let (c, s, sign) = (cos[angle], sin[angle], select(column < half_front, 1.0f32, -1.0f32));
        let (own, other) = (column as usize, ((column + half_front) % front) as usize);
        let mut result = Vec8::<E>::empty();
        #[unroll]
        for i in 0..8usize {
            let (nth, part) = comptime![(i % 4, i / 4 * front as usize)];
            let (a, b) = (totals[own + part].extract(nth), totals[other + part].extract(nth));
            let (c, s) = (f32::cast_from(c.extract(i)), f32::cast_from(s.extract(i)) * sign);
            result.insert(i, E::cast_from(a * c + b * s));
        }
        shared[(CUBE_POS_X * front + column) as usize] = result;
        column += CUBE_DIM_X;
    }
}

/// `keys` of `kv` and `shared`, which is rotated by the angles `cos, sin [tokens / batch, rotated / 2]` ("rotate
/// half"); all of type `E` and without gaps.
///
/// # Errors
/// If there is no kernel for the shape, or a buffer is too short.
pub fn keys<E: Float>(
    client: &Client,
    kv: &Handle,
    shared: &Handle,
    (cos, sin): (&Handle, &Handle),
    keys: &Handle,
    shape: LatentShape,
) -> Result<(), PointwiseError> {
    shape.check()?;
    let ([of_keys, of_both, of_shared, of_angles], bytes) = (shape.vectors(), 8 * size_of::<E>());
    let kv = buffer("keys and values", kv, of_both, bytes)?;
    let shared = buffer("the shared key", shared, of_shared, bytes)?;
    let (cos, sin) = (buffer("cos", cos, of_angles, bytes)?, buffer("sin", sin, of_angles, bytes)?);
    let keys = buffer("keys", keys, of_keys, bytes)?;
    let (cube, items) = (CubeShape::of(client), of_keys / shape.tokens);
    // SAFETY: every unit writes a vector of its token's keys and reads those of the same token, and the buffers hold
    // all tokens.
    unsafe {
        join_keys::launch_unchecked::<E>(
            client,
            cube.rows(shape.tokens, items),
            cube.dim(),
            kv,
            shared,
            cos,
            sin,
            keys,
            items as u32,
            shape.batch as u32,
            shape.parts(),
        )
    };
    Ok(())
}

/// The gradients of `kv` and `shared` in [`keys`] and in the values that lie beside them, from those of keys and of
/// values `[tokens, heads, value]`. The shared key's is a sum over the heads in fp32, always in the same order.
///
/// # Errors
/// As [`keys`].
pub fn gradients<E: Float>(
    client: &Client,
    [keys, values]: [&Handle; 2],
    (cos, sin): (&Handle, &Handle),
    [kv, shared]: [&Handle; 2],
    shape: LatentShape,
) -> Result<(), PointwiseError> {
    shape.check()?;
    let ([of_keys, of_both, of_shared, of_angles], bytes) = (shape.vectors(), 8 * size_of::<E>());
    let keys = buffer("gradients of keys", keys, of_keys, bytes)?;
    let values = buffer("gradients of values", values, shape.tokens * shape.heads * shape.value / 8, bytes)?;
    let (cos, sin) = (buffer("cos", cos, of_angles, bytes)?, buffer("sin", sin, of_angles, bytes)?);
    let kv = buffer("gradients of keys and values", kv, of_both, bytes)?;
    let shared = buffer("the shared key's gradient", shared, of_shared, bytes)?;
    let cube = CubeShape::of(client);
    // SAFETY: a cube reads and writes what belongs to its token, every vector written by one unit, and the buffers hold
    // all tokens.
    unsafe {
        part_gradients::launch_unchecked::<E>(
            client,
            CubeCount::Static(shape.tokens as u32, 1, 1),
            cube.dim(),
            keys,
            values,
            cos,
            sin,
            kv,
            shared,
            shape.heads as u32,
            shape.batch as u32,
            shape.parts(),
            cube,
        )
    };
    Ok(())
}
