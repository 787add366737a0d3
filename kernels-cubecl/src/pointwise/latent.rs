//! Keys of multi-head latent attention (MLA): the rope features, which all heads share, before the features of each
//! head, which lie next to its value.
use super::norm::backward::half;
use super::{CubeShape, F32x4, PointwiseError, Vec8, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Most features of a section of a head.
const LONGEST: usize = 1024;

/// Sizes of a call: `kv [tokens, heads, nope_dim + value_dim]` and `shared [tokens, rope_dim]` make keys `[tokens,
/// heads, rope_dim + nope_dim]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentShape {
    /// Positions of all sequences.
    pub tokens: usize,
    /// Consecutive tokens with the same angles.
    pub batch: usize,
    /// Heads.
    pub heads: usize,
    /// Features of a key that all heads share, rotated.
    pub rope_dim: usize,
    /// Features of a key of its own head, not rotated.
    pub nope_dim: usize,
    /// Features of a value.
    pub value_dim: usize,
}

impl LatentShape {
    /// Whether there are kernels for this shape.
    pub fn has_kernel(&self) -> bool {
        self.check().is_ok()
    }

    fn check(&self) -> Result<(), PointwiseError> {
        check("rope_dim", self.rope_dim, 16, LONGEST)?;
        check("nope_dim", self.nope_dim, 8, LONGEST)?;
        check("value_dim", self.value_dim, 8, LONGEST)?;
        check("heads", self.heads, 1, u16::MAX as usize)?;
        check("tokens of the same angles", self.batch, 1, self.tokens)?;
        let token = self.heads * (self.rope_dim + self.nope_dim).max(self.nope_dim + self.value_dim) / 8;
        check("tokens", self.tokens, self.batch, i32::MAX as usize / token)
    }

    /// Vectors of all tokens' keys, of `kv`, of the shared key, and of one table of angles.
    fn vectors(&self) -> [usize; 4] {
        let heads = self.tokens * self.heads;
        [
            heads * (self.rope_dim + self.nope_dim) / 8,
            heads * (self.nope_dim + self.value_dim) / 8,
            self.tokens * self.rope_dim / 8,
            self.tokens / self.batch * self.rope_dim / 16,
        ]
    }

    fn head_vectors(&self) -> HeadVectors {
        let [half, nope_dim, value_dim] =
            [self.rope_dim / 16, self.nope_dim / 8, self.value_dim / 8].map(|vectors| vectors as u32);
        HeadVectors { half, nope_dim, value_dim }
    }
}

/// Vectors of the sections of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HeadVectors {
    /// Half of the rotated features.
    pub half: u32,
    /// Features of a key of its own head.
    pub nope_dim: u32,
    /// A value.
    pub value_dim: u32,
}

impl HeadVectors {
    /// Units that share a column of the shared key; each takes every n-th head.
    fn lanes(self, cube: CubeShape) -> u32 {
        (cube.units / (2 * self.half)).max(1)
    }
}

/// Cube `(token, items)`: an item is a vector of a key; a token's keys have `vectors` of them.
#[cube(launch_unchecked)]
pub fn join_keys<E: Float>(
    kv: &[Vec8<E>],
    shared: &[Vec8<E>],
    cos: &[Vec8<E>],
    sin: &[Vec8<E>],
    keys: &mut [Vec8<E>],
    vectors: u32,
    batch: u32,
    #[comptime] sections: HeadVectors,
) {
    let (half, front, length) = comptime![(sections.half, 2 * sections.half, 2 * sections.half + sections.nope_dim)];
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
            result = kv[(head * comptime![sections.nope_dim + sections.value_dim] + column - front) as usize];
        }
        keys[(CUBE_POS_X * vectors + item) as usize] = result;
    }
}

/// A cube for each token. Several units sum each column of the shared key, each over every n-th head; their sums are
/// added in a fixed order.
#[cube(launch_unchecked)]
pub fn split_gradients<E: Float>(
    keys: &[Vec8<E>],
    values: &[Vec8<E>],
    cos: &[Vec8<E>],
    sin: &[Vec8<E>],
    kv: &mut [Vec8<E>],
    shared: &mut [Vec8<E>],
    heads: u32,
    batch: u32,
    #[comptime] sections: HeadVectors,
    #[comptime] cube: CubeShape,
) {
    let (half_front, front, length) =
        comptime![(sections.half, 2 * sections.half, 2 * sections.half + sections.nope_dim)];
    let (nope_dim, value_dim, both) =
        comptime![(sections.nope_dim, sections.value_dim, sections.nope_dim + sections.value_dim)];
    let (lanes, all) = comptime![(sections.lanes(cube), sections.lanes(cube) * 2 * sections.half)];
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
            let dy = keys[((first + head) * length + task % front) as usize];
            #[unroll]
            for i in 0..8usize {
                sums[i] = sums[i] + f32::cast_from(dy.extract(i));
            }
            head += lanes;
        }
        lines[task as usize] = half(&mut sums, 0usize);
        lines[(task + all) as usize] = half(&mut sums, 4usize);
        task += CUBE_DIM_X;
    }
    let mut item = UNIT_POS;
    while item < heads * nope_dim {
        let (head, column) = (first + item / nope_dim, item % nope_dim);
        kv[(head * both + column) as usize] = keys[(head * length + front + column) as usize];
        item += CUBE_DIM_X;
    }
    let mut item = UNIT_POS;
    while item < heads * value_dim {
        let (head, column) = (first + item / value_dim, item % value_dim);
        kv[(head * both + nope_dim + column) as usize] = values[(head * value_dim + column) as usize];
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

/// `keys` from `kv` and from `shared`, rotated by the angles `cos, sin [tokens / batch, rope_dim / 2]` ("rotate half");
/// all of type `E` and without gaps.
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
        launch_kernel!(join_keys<E>, client, cube.rows(shape.tokens, items), cube.dim();
            kv, shared, cos, sin, keys; items as u32, shape.batch as u32; shape.head_vectors())
    };
    Ok(())
}

/// The gradients of `kv` and `shared`, from those of the keys in [`keys`] and of the values `[tokens, heads,
/// value_dim]`. The shared key's is a sum over the heads in fp32, always in the same order.
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
    let values = buffer("gradients of values", values, shape.tokens * shape.heads * shape.value_dim / 8, bytes)?;
    let (cos, sin) = (buffer("cos", cos, of_angles, bytes)?, buffer("sin", sin, of_angles, bytes)?);
    let kv = buffer("gradients of keys and values", kv, of_both, bytes)?;
    let shared = buffer("the shared key's gradient", shared, of_shared, bytes)?;
    let cube = CubeShape::of(client);
    // SAFETY: a cube reads and writes what belongs to its token, every vector written by one unit, and the buffers hold
    // all tokens.
    unsafe {
        launch_kernel!(split_gradients<E>, client, CubeCount::Static(shape.tokens as u32, 1, 1), cube.dim();
            keys, values, cos, sin, kv, shared; shape.heads as u32, shape.batch as u32; shape.head_vectors(), cube)
    };
    Ok(())
}
