//! Keys of latent attention: some features that all heads share in front of those of a head's own, which lie beside its value.
use super::{CubeShape, PointwiseError, Vec8, buffer, check};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Heads whose gradients a unit reads at a time.
const AHEAD: u32 = 8;
/// Most features of a part of a head.
const LONGEST: usize = 1 << 16;

/// What a call works on: `kv [tokens, heads, own + value]` and `shared [tokens, shared]` make keys
/// `[tokens, heads, shared + own]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentShape {
    /// Positions of all sequences.
    pub tokens: usize,
    /// Heads.
    pub heads: usize,
    /// Features of a key that all heads have.
    pub shared: usize,
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
        for (what, features) in
            [("shared features", self.shared), ("own features", self.own), ("value features", self.value)]
        {
            check(what, features, 8, LONGEST)?;
        }
        check("heads", self.heads, 1, u16::MAX as usize)?;
        let token = self.heads * (self.shared + self.own).max(self.own + self.value) / 8;
        check("tokens", self.tokens, 1, i32::MAX as usize / token)
    }

    /// Vectors of a token's keys and of its keys and values.
    fn vectors(&self) -> [usize; 2] {
        [self.shared + self.own, self.own + self.value].map(|features| self.heads * features / 8)
    }
}

/// Cube `(token, vectors)`: a vector of a key. Lengths are in vectors.
#[cube(launch_unchecked)]
pub fn join_keys<E: Float>(
    kv: &[Vec8<E>],
    shared: &[Vec8<E>],
    keys: &mut [Vec8<E>],
    vectors: u32,
    #[comptime] front: u32,
    #[comptime] own: u32,
    #[comptime] value: u32,
) {
    let item = CUBE_POS_Y * CUBE_DIM_X + UNIT_POS;
    if item < vectors {
        let head = item / comptime![front + own];
        let column = item % comptime![front + own];
        let to = (CUBE_POS_X * vectors + item) as usize;
        if column < front {
            keys[to] = shared[(CUBE_POS_X * front + column) as usize];
        } else {
            let token = CUBE_POS_X * (vectors / comptime![front + own]) * comptime![own + value];
            keys[to] = kv[(token + head * comptime![own + value] + column - front) as usize];
        }
    }
}

/// Cube `(token, vectors)`: a vector of the gradient of a head's own key or of its value.
#[cube(launch_unchecked)]
pub fn part_gradients<E: Float>(
    keys: &[Vec8<E>],
    values: &[Vec8<E>],
    kv: &mut [Vec8<E>],
    vectors: u32,
    #[comptime] front: u32,
    #[comptime] own: u32,
    #[comptime] value: u32,
) {
    let item = CUBE_POS_Y * CUBE_DIM_X + UNIT_POS;
    if item < vectors {
        let heads = vectors / comptime![own + value];
        let head = CUBE_POS_X * heads + item / comptime![own + value];
        let column = item % comptime![own + value];
        let to = (CUBE_POS_X * vectors + item) as usize;
        if column < own {
            kv[to] = keys[(head * comptime![front + own] + front + column) as usize];
        } else {
            kv[to] = values[(head * value + column - own) as usize];
        }
    }
}

/// A unit for each vector of what is shared: the sum over the heads in their order, in fp32.
#[cube(launch_unchecked)]
pub fn sum_heads<E: Float>(
    keys: &[Vec8<E>],
    shared: &mut [Vec8<E>],
    items: u32,
    heads: u32,
    #[comptime] front: u32,
    #[comptime] own: u32,
) {
    let item = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if item < items {
        let length = comptime![front + own];
        let first = item / front * heads * length + item % front;
        let mut sums = Array::<f32>::new(8usize);
        #[unroll]
        for i in 0..8usize {
            sums[i] = 0.0f32;
        }
        let mut head = 0u32;
        while head < heads {
            let mut ahead = Array::<Vec8<E>>::new(comptime![AHEAD as usize]);
            #[unroll]
            for k in 0..comptime![AHEAD as usize] {
                let nth = min(head + comptime![k as u32], heads - 1);
                ahead[k] = keys[(first + nth * length) as usize];
            }
            #[unroll]
            for k in 0..comptime![AHEAD as usize] {
                let counts = select(head + comptime![k as u32] < heads, 1.0f32, 0.0f32);
                #[unroll]
                for i in 0..8usize {
                    sums[i] += counts * f32::cast_from(ahead[k].extract(i));
                }
            }
            head += AHEAD;
        }
        let mut result = Vec8::<E>::empty();
        #[unroll]
        for i in 0..8usize {
            result.insert(i, E::cast_from(sums[i]));
        }
        shared[item as usize] = result;
    }
}

/// `keys` of `kv` and `shared`, all of type `E` (2 bytes) and without gaps.
///
/// # Errors
/// If there is no kernel for the shape, or a buffer is too short.
pub fn keys<E: Float>(
    client: &Client,
    kv: &Handle,
    shared: &Handle,
    keys: &Handle,
    shape: LatentShape,
) -> Result<(), PointwiseError> {
    shape.check()?;
    let (LatentShape { tokens, .. }, [of_keys, of_both], bytes) = (shape, shape.vectors(), 8 * size_of::<E>());
    let kv = buffer("keys and values", kv, tokens * of_both, bytes)?;
    let shared = buffer("the shared key", shared, tokens * shape.shared / 8, bytes)?;
    let keys = buffer("keys", keys, tokens * of_keys, bytes)?;
    let cube = CubeShape::of(client);
    let [front, own, value] = [shape.shared, shape.own, shape.value].map(|features| (features / 8) as u32);
    // SAFETY: every unit writes a vector of its token's keys and reads one of the same token, and the buffers hold all tokens.
    unsafe {
        join_keys::launch_unchecked::<E>(
            client,
            cube.rows(tokens, of_keys),
            cube.dim(),
            kv,
            shared,
            keys,
            of_keys as u32,
            front,
            own,
            value,
        )
    };
    Ok(())
}

/// The gradients of `kv` and `shared` in [`keys`] and in the values, from those of keys and of values
/// `[tokens, heads, value]`. Heads are summed up in their order, in fp32.
///
/// # Errors
/// As [`keys`].
pub fn gradients<E: Float>(
    client: &Client,
    [keys, values]: [&Handle; 2],
    [kv, shared]: [&Handle; 2],
    shape: LatentShape,
) -> Result<(), PointwiseError> {
    shape.check()?;
    let (LatentShape { tokens, heads, .. }, [of_keys, of_both]) = (shape, shape.vectors());
    let (bytes, items) = (8 * size_of::<E>(), tokens * shape.shared / 8);
    let read = || buffer("gradients of keys", keys, tokens * of_keys, bytes);
    let values = buffer("gradients of values", values, tokens * heads * shape.value / 8, bytes)?;
    let kv = buffer("gradients of keys and values", kv, tokens * of_both, bytes)?;
    let shared = buffer("the shared key's gradient", shared, items, bytes)?;
    let cube = CubeShape::of(client);
    let [front, own, value] = [shape.shared, shape.own, shape.value].map(|features| (features / 8) as u32);
    let (first, second) = (read()?, read()?);
    // SAFETY: every unit writes one vector and reads vectors of the same token, and the buffers hold all tokens.
    unsafe {
        part_gradients::launch_unchecked::<E>(
            client,
            cube.rows(tokens, of_both),
            cube.dim(),
            first,
            values,
            kv,
            of_both as u32,
            front,
            own,
            value,
        );
        sum_heads::launch_unchecked::<E>(
            client,
            cube.line(items),
            cube.dim(),
            second,
            shared,
            items as u32,
            heads as u32,
            front,
            own,
        )
    };
    Ok(())
}
