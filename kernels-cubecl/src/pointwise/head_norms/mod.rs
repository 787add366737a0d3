//! RMSNorm of the query heads and of the key heads of a packed projection, with a weight for queries and one for keys;
//! the value heads are copied. And its gradients.
//!
//! A head's units are part of a plane, or one unit where planes are single units, so they add up without a barrier.
pub mod gradient;

use super::{CubeShape, PointwiseError, Vec8, buffer, check, norm::multiplier};
use crate::hopper::ptx::rsqrt;
use cubecl::prelude::*;
use cubecl::server::Handle;
pub use gradient::backward;

/// Longest head: a vector for each unit of a plane.
const LONGEST: usize = 256;

/// Sizes of a call: `x [tokens, all_heads, head_dim]`; the first `heads` heads are queries and the next `kv_heads`
/// keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadsShape {
    /// Positions of all sequences.
    pub tokens: usize,
    /// Query heads.
    pub heads: usize,
    /// Key heads.
    pub kv_heads: usize,
    /// All heads.
    pub all_heads: usize,
    /// Length of a head.
    pub head_dim: usize,
}

impl HeadsShape {
    /// Whether there is a kernel for this shape.
    pub fn has_kernel(&self) -> bool {
        self.check().is_ok()
    }

    fn check(&self) -> Result<(), PointwiseError> {
        check("head_dim", self.head_dim, 8, LONGEST)?;
        check("head_dim", self.head_dim, self.head_dim.next_power_of_two(), LONGEST)?;
        check("all_heads", self.all_heads, 1, u16::MAX as usize)?;
        check("query and key heads", self.heads + self.kv_heads, 1, self.all_heads)?;
        check("tokens", self.tokens, 1, i32::MAX as usize / (self.all_heads * self.head_dim / 8))
    }

    /// Heads of all tokens.
    fn rows(&self) -> usize {
        self.tokens * self.all_heads
    }
}

/// How heads are distributed over a cube's units.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Line {
    /// Units of a head.
    units: u32,
    /// Vectors of a unit.
    vectors: u32,
    /// Heads of a cube.
    side: u32,
}

impl Line {
    /// The distribution for this `head_dim`.
    pub fn of(cube: CubeShape, head_dim: usize) -> Self {
        let width = head_dim as u32 / 8;
        let units = if cube.plane == 1 { 1 } else { width };
        Self { units, vectors: width / units, side: cube.units / units }
    }

    fn all(self) -> u32 {
        self.units * self.side
    }
}

/// The sum over a head's units, in all of them.
#[cube]
fn line_total(value: f32, #[comptime] line: Line) -> f32 {
    let mut total = value;
    #[unroll]
    for i in 0..comptime![line.units.ilog2()] {
        total += plane_shuffle_xor(total, comptime![1u32 << i]);
    }
    total
}

/// A unit takes its vectors of a head. `normed` heads are queries and keys.
#[cube(launch_unchecked)]
pub fn norm_heads<E: Float>(
    x: &[Vec8<E>],
    q: &[Vec8<E>],
    k: &[Vec8<E>],
    y: &mut [Vec8<E>],
    eps: f32,
    inverse: f32,
    rows: u32,
    heads: u32,
    normed: u32,
    all_heads: u32,
    #[comptime] plus_one: bool,
    #[comptime] line: Line,
) {
    let unit = UNIT_POS % comptime![line.units];
    let row = CUBE_POS_X * comptime![line.side] + UNIT_POS / comptime![line.units];
    // Past the last row it is read again: the units of a plane add up together.
    let at = min(row, rows - 1);
    let head = at % all_heads;
    let first = at * comptime![line.units * line.vectors] + unit;
    let mut values = Array::<Vec8<E>>::new(comptime![line.vectors as usize]);
    let mut squares = 0.0f32;
    #[unroll]
    for v in 0..comptime![line.vectors] {
        let value = x[(first + comptime![v * line.units]) as usize];
        values[comptime![v as usize]] = value;
        #[unroll]
        for i in 0..8usize {
            let number = f32::cast_from(value.extract(i));
            squares += number * number;
        }
    }
    let factor = rsqrt(line_total(squares, line) * inverse + eps);
    if row < rows {
        #[unroll]
        for v in 0..comptime![line.vectors] {
            let value = values[comptime![v as usize]];
            let place = (first + comptime![v * line.units]) as usize;
            if head < normed {
                let column = (unit + comptime![v * line.units]) as usize;
                let mut weight = q[column];
                if head >= heads {
                    weight = k[column];
                }
                let mut result = Vec8::<E>::empty();
                #[unroll]
                for i in 0..8usize {
                    let scaled =
                        f32::cast_from(value.extract(i)) * factor * multiplier::<E>(weight.extract(i), plus_one);
                    result.insert(i, E::cast_from(scaled));
                }
                y[place] = result;
            } else {
                y[place] = value;
            }
        }
    }
}
/// `y` from `x` and the weights of queries and keys `[head_dim]`, all of type `E` and without gaps; statistics in fp32.
/// With `plus_one` one is added to the weights, in fp32.
///
/// # Errors
/// If there is no kernel for the shape, or a buffer is too short.
pub fn forward<E: Float>(
    client: &Client,
    x: &Handle,
    [q, k]: [&Handle; 2],
    y: &Handle,
    (eps, plus_one): (f32, bool),
    shape: HeadsShape,
) -> Result<(), PointwiseError> {
    shape.check()?;
    let (rows, width, vector) = (shape.rows(), shape.head_dim / 8, 8 * size_of::<E>());
    let line = Line::of(CubeShape::of(client), shape.head_dim);
    let (x, y) = (buffer("x", x, rows * width, vector)?, buffer("y", y, rows * width, vector)?);
    let (q, k) = (buffer("the queries' weight", q, width, vector)?, buffer("the keys' weight", k, width, vector)?);
    // SAFETY: every unit stays in its head, and the buffers hold all heads.
    unsafe {
        launch_kernel!(norm_heads<E>, client, CubeCount::Static((rows as u32).div_ceil(line.side), 1, 1),
            CubeDim::new_1d(line.all());
            x, q, k, y;
            eps, 1.0 / shape.head_dim as f32, rows as u32, shape.heads as u32, (shape.heads + shape.kv_heads) as u32,
            shape.all_heads as u32; plus_one, line)
    };
    Ok(())
}
