//! Features of a sequence in the order of a GEMM's operand, and back.
use super::{CubeShape, PointwiseError, SsdShape, Vec8, buffer};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Which features: `heads` of `head_dim` each, from `first` of `width` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// Of a position.
    pub width: usize,
    /// The first one.
    pub first: usize,
    /// Heads, or groups.
    pub heads: usize,
    /// Groups of the heads.
    pub groups: usize,
    /// Features of a head.
    pub head_dim: usize,
}

impl SsdShape {
    /// Those of x in `[s, b, x B C]`.
    pub fn x(&self) -> Features {
        self.heads_of(self.width())
    }

    /// Those of the layer's output `[s, b, h p]`.
    pub fn output(&self) -> Features {
        self.heads_of(self.inner())
    }

    /// Those of B and of C in `[s, b, x B C]`.
    pub fn grouped(&self) -> [Features; 2] {
        let Self { groups, state, .. } = *self;
        let of = |first| Features { width: self.width(), first, heads: groups, groups, head_dim: state };
        [of(self.inner()), of(self.inner() + groups * state)]
    }

    fn heads_of(&self, width: usize) -> Features {
        let Self { heads, groups, head_dim, .. } = *self;
        Features { width, first: 0, heads, groups, head_dim }
    }
}

/// Sizes at compile time; lengths are in vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Order {
    heads: u32,
    groups: u32,
    vectors: u32,
    chunk: u32,
    /// Factors of what is arranged, or summands of what is put back.
    factors: u32,
}

impl Order {
    /// Of these features, in chunks, with so many factors or summands.
    pub fn of(of: Features, chunk: usize, factors: usize) -> Self {
        let size = |size: usize| size as u32;
        Self {
            heads: size(of.heads),
            groups: size(of.groups),
            vectors: size(of.head_dim / 8),
            chunk: size(chunk),
            factors: size(factors),
        }
    }

    fn line(self) -> u32 {
        self.heads * self.vectors
    }
}

/// A unit for each vector of the chunks. Padding is zeros.
#[cube(launch_unchecked)]
pub fn arrange_features<E: Float>(
    x: &[Vec8<E>],
    factor: &[f32],
    other_factor: &[f32],
    by_head: &mut [Vec8<E>],
    by_column: &mut [Vec8<E>],
    seq: u32,
    samples: u32,
    chunks: u32,
    width: u32,
    first: u32,
    items: u32,
    #[comptime] order: Order,
) {
    let item = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if item < items {
        let (line, vectors) = comptime![(order.line(), order.vectors)];
        let (place, feature) = (item / line, item % line);
        let (block, l) = (place / comptime![order.chunk], place % comptime![order.chunk]);
        let t = block % chunks * comptime![order.chunk] + l;
        let (head, v) = (feature / vectors, feature % vectors);
        let mut value = Vec8::<E>::new(E::from_int(0));
        if t < seq {
            value = x[((t * samples + block / chunks) * width + first + feature) as usize];
        }
        let at = (block * comptime![order.heads] + head) * comptime![order.chunk] + l;
        by_head[(at * vectors + v) as usize] = value;
        if comptime![order.factors > 0] {
            let mut scale = factor[at as usize];
            if comptime![order.factors > 1] {
                scale *= other_factor[at as usize];
            }
            let mut scaled = Vec8::<E>::empty();
            #[unroll]
            for i in 0..8usize {
                scaled.insert(i, E::cast_from(f32::cast_from(value.extract(i)) * scale));
            }
            let serves = comptime![order.heads / order.groups];
            let group = block * comptime![order.groups] + head / serves;
            let column = head % serves * vectors + v;
            by_column[((group * comptime![order.chunk] + l) * comptime![serves * vectors] + column) as usize] = scaled;
        }
    }
}

/// The features `of` of `x [s, b, width]` by head, and if there are factors `[b, c, h, l]`, times all of them by column.
///
/// # Errors
/// If there is no kernel for the shape, or a buffer is too short.
pub fn arrange<E: Float>(
    client: &Client,
    x: &Handle,
    factors: &[&Handle],
    by_head: &Handle,
    by_column: Option<&Handle>,
    of: Features,
    shape: SsdShape,
) -> Result<(), PointwiseError> {
    shape.check()?;
    let (vector, blocks) = (8 * size_of::<E>(), shape.samples * shape.chunks());
    let items = blocks * shape.chunk * of.heads * of.head_dim / 8;
    let numbers = blocks * shape.chunk * of.heads;
    let source = buffer("x", x, shape.seq * shape.samples * of.width / 8, vector)?;
    let factor = |at: usize| match factors.get(at) {
        Some(factor) => buffer("factors", factor, numbers, 4),
        None => buffer("x", x, 1, 4),
    };
    let (scaled, count) = match by_column {
        Some(by_column) => (buffer("by_column", by_column, items, vector)?, factors.len()),
        None => (buffer("by_column", &client.empty(vector), 1, vector)?, 0),
    };
    let cube = CubeShape::of(client);
    // SAFETY: every unit stays in its vectors, and the buffers hold all of them.
    unsafe {
        launch_kernel!(arrange_features<E>, client, cube.line(items), cube.dim();
            source, factor(0)?, factor(1)?, buffer("by_head", by_head, items, vector)?, scaled;
            shape.seq as u32, shape.samples as u32, shape.chunks() as u32, of.width as u32 / 8, of.first as u32 / 8,
            items as u32; Order::of(of, shape.chunk, count))
    };
    Ok(())
}

/// A unit for each vector of the sequence's features.
#[cube(launch_unchecked)]
pub fn add_features<E: Float>(
    a: &[Vec8<E>],
    b: &[Vec8<E>],
    x: &mut [Vec8<E>],
    samples: u32,
    chunks: u32,
    width: u32,
    first: u32,
    items: u32,
    #[comptime] order: Order,
) {
    let item = CUBE_POS_X * CUBE_DIM_X + UNIT_POS;
    if item < items {
        let (line, vectors) = comptime![(order.line(), order.vectors)];
        let (place, feature) = (item / line, item % line);
        let (t, sample) = (place / samples, place % samples);
        let block = sample * chunks + t / comptime![order.chunk];
        let head = block * comptime![order.heads] + feature / vectors;
        let from =
            ((head * comptime![order.chunk] + t % comptime![order.chunk]) * vectors + feature % vectors) as usize;
        let mut sum = a[from];
        if comptime![order.factors > 1] {
            let (left, right) = (a[from], b[from]);
            #[unroll]
            for i in 0..8usize {
                sum.insert(i, E::cast_from(f32::cast_from(left.extract(i)) + f32::cast_from(right.extract(i))));
            }
        }
        x[(place * width + first + feature) as usize] = sum;
    }
}

/// The features `of` of `x [s, b, width]` from a tensor by head, or the sum of two; other features stay as they are.
pub fn add<E: Float>(
    client: &Client,
    summands: &[&Handle],
    x: &Handle,
    of: Features,
    shape: SsdShape,
) -> Result<(), PointwiseError> {
    shape.check()?;
    let (vector, positions) = (8 * size_of::<E>(), shape.seq * shape.samples);
    let (line, cube) = (of.heads * of.head_dim / 8, CubeShape::of(client));
    let held = shape.samples * shape.chunks() * shape.chunk * line;
    let summand = |at: usize| buffer("summands", summands[at.min(summands.len() - 1)], held, vector);
    // SAFETY: every unit stays in its vectors, and the buffers hold all of them.
    unsafe {
        launch_kernel!(add_features<E>, client, cube.line(positions * line), cube.dim();
            summand(0)?, summand(1)?, buffer("x", x, positions * of.width / 8, vector)?;
            shape.samples as u32, shape.chunks() as u32, of.width as u32 / 8, of.first as u32 / 8,
            (positions * line) as u32; Order::of(of, shape.chunk, summands.len()))
    };
    Ok(())
}
