//! RMSNorm of a gated value, `w u / √(mean(u²) + eps)` with `u = x silu(gate)`, in groups of features, and its gradients.
use super::gated::{gate_gradient, gated};
use super::partial_sums::sum_partials;
use super::sigmoid::sigmoid;
use super::{CubeShape, F32x4, PointwiseError, Vec8, buffer, check, cube_sums};
use crate::hopper::ptx::rsqrt;
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Most vectors of a unit.
const MOST: u32 = 8;
/// Rows of a cube of the backward pass, for each of which it writes partial sums once.
const RUN: u32 = 8;

/// Sizes of a call: `x [rows, groups, features]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatedShape {
    /// Positions of all sequences.
    pub rows: usize,
    /// Groups, each normalised for itself.
    pub groups: usize,
    /// Features of a group.
    pub features: usize,
}

impl GatedShape {
    /// Whether there are kernels for this shape.
    pub fn has_kernel(&self) -> bool {
        self.check().is_ok()
    }

    fn check(&self) -> Result<(), PointwiseError> {
        check("features", self.features, 8, (8 * MOST * CubeShape::GPU.units) as usize)?;
        check("groups", self.groups, 1, 65_535)?;
        check("rows", self.rows, 1, super::MOST / (self.groups * self.features / 8))
    }

    fn vectors(&self) -> usize {
        self.rows * self.groups * self.features / 8
    }
}

/// How a group's vectors are distributed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Share {
    /// The cube.
    pub cube: CubeShape,
    /// Vectors of a group.
    pub width: u32,
}

impl Share {
    fn of(client: &Client, shape: GatedShape) -> Self {
        let width = shape.features / 8;
        Self { cube: CubeShape::of(client).fitting(width), width: width as u32 }
    }

    /// Vectors of a unit.
    fn vectors(self) -> u32 {
        self.width.div_ceil(self.cube.units)
    }
}

/// A cube for each group of each row.
#[cube(launch_unchecked)]
pub fn gated_norm<E: Float>(
    x: &[Vec8<E>],
    gate: &[Vec8<E>],
    weight: &[Vec8<E>],
    y: &mut [Vec8<E>],
    eps: f32,
    inverse: f32,
    groups: u32,
    #[comptime] share: Share,
) {
    let mut scratch = Shared::<[f32]>::new_slice(comptime![share.cube.scratch()]);
    let first = (CUBE_POS_X * groups + CUBE_POS_Y) * share.width;
    let mut values = Array::<f32>::new(comptime![8 * share.vectors() as usize]);
    let mut squares = 0.0f32;
    #[unroll]
    for v in 0..comptime![share.vectors()] {
        let column = UNIT_POS + comptime![v * share.cube.units];
        if column < share.width {
            let (own, of_gate) = (x[(first + column) as usize], gate[(first + column) as usize]);
            #[unroll]
            for i in 0..8usize {
                let value = gated(f32::cast_from(of_gate.extract(i)), f32::cast_from(own.extract(i)));
                values[comptime![v as usize * 8 + i]] = value;
                squares += value * value;
            }
        }
    }
    let (total, _) = cube_sums(squares, 0.0, &mut scratch, 0, share.cube);
    let factor = rsqrt(total * inverse + eps);
    #[unroll]
    for v in 0..comptime![share.vectors()] {
        let column = UNIT_POS + comptime![v * share.cube.units];
        if column < share.width {
            let scale = weight[(CUBE_POS_Y * share.width + column) as usize];
            let mut result = Vec8::<E>::empty();
            #[unroll]
            for i in 0..8usize {
                let normed = values[comptime![v as usize * 8 + i]] * factor;
                result.insert(i, E::cast_from(normed * f32::cast_from(scale.extract(i))));
            }
            y[(first + column) as usize] = result;
        }
    }
}

/// A cube takes a group of a run of rows, and writes its sums of the weight's gradient to a row of `partials`.
#[cube(launch_unchecked)]
pub fn gated_norm_gradients<E: Float>(
    x: &[Vec8<E>],
    gate: &[Vec8<E>],
    weight: &[Vec8<E>],
    dy: &[Vec8<E>],
    x_gradient: &mut [Vec8<E>],
    gate_gradients: &mut [Vec8<E>],
    partials: &mut [F32x4],
    eps: f32,
    inverse: f32,
    rows: u32,
    groups: u32,
    run: u32,
    #[comptime] share: Share,
) {
    let mut scratch = Shared::<[f32]>::new_slice(comptime![share.cube.scratch()]);
    let mut sums = Array::<f32>::new(comptime![8 * share.vectors() as usize]);
    #[unroll]
    for i in 0..comptime![8 * share.vectors() as usize] {
        sums[i] = 0.0f32;
    }
    let end = min((CUBE_POS_X + 1) * run, rows);
    for row in CUBE_POS_X * run..end {
        let first = (row * groups + CUBE_POS_Y) * share.width;
        let mut squares = 0.0f32;
        let mut dot = 0.0f32;
        #[unroll]
        for v in 0..comptime![share.vectors()] {
            let column = UNIT_POS + comptime![v * share.cube.units];
            if column < share.width {
                let at = (first + column) as usize;
                let (own, of_gate, slope) = (x[at], gate[at], dy[at]);
                let scale = weight[(CUBE_POS_Y * share.width + column) as usize];
                #[unroll]
                for i in 0..8usize {
                    let value = gated(f32::cast_from(of_gate.extract(i)), f32::cast_from(own.extract(i)));
                    squares += value * value;
                    dot += value * f32::cast_from(slope.extract(i)) * f32::cast_from(scale.extract(i));
                }
            }
        }
        let (squares, dot) = cube_sums(squares, dot, &mut scratch, row % 2, share.cube);
        let factor = rsqrt(squares * inverse + eps);
        let along = dot * factor * factor * inverse;
        #[unroll]
        for v in 0..comptime![share.vectors()] {
            let column = UNIT_POS + comptime![v * share.cube.units];
            if column < share.width {
                let at = (first + column) as usize;
                let (own, of_gate, slope) = (x[at], gate[at], dy[at]);
                let scale = weight[(CUBE_POS_Y * share.width + column) as usize];
                let mut dx = Vec8::<E>::empty();
                let mut d_gate = Vec8::<E>::empty();
                #[unroll]
                for i in 0..8usize {
                    let (x, g) = (f32::cast_from(own.extract(i)), f32::cast_from(of_gate.extract(i)));
                    let slope = f32::cast_from(slope.extract(i));
                    let value = gated(g, x);
                    let slot = comptime![v as usize * 8 + i];
                    sums[slot] = sums[slot] + slope * value * factor;
                    let of_value = factor * (slope * f32::cast_from(scale.extract(i)) - value * along);
                    let s = sigmoid(g);
                    dx.insert(i, E::cast_from(of_value * g * s));
                    d_gate.insert(i, E::cast_from(gate_gradient(of_value, g, x, s)));
                }
                x_gradient[at] = dx;
                gate_gradients[at] = d_gate;
            }
        }
    }
    let line = (CUBE_POS_X * groups + CUBE_POS_Y) * share.width * 2;
    #[unroll]
    for half in 0..comptime![2 * share.vectors()] {
        let column = UNIT_POS + comptime![half / 2 * share.cube.units];
        if column < share.width {
            let mut four = F32x4::empty();
            #[unroll]
            for i in 0..4usize {
                four.insert(i, sums[comptime![half as usize * 4 + i]]);
            }
            partials[(line + column * 2 + comptime![half % 2]) as usize] = four;
        }
    }
}

/// `y [rows, groups, features]` from `x` and `gate` of its shape and `weight [groups, features]`, all of type `E`.
///
/// # Errors
/// If there is no kernel for the shape, or a buffer is too short.
pub fn forward<E: Float>(
    client: &Client,
    [x, gate, weight]: [&Handle; 3],
    y: &Handle,
    eps: f32,
    shape: GatedShape,
) -> Result<(), PointwiseError> {
    shape.check()?;
    let (vector, vectors, share) = (8 * size_of::<E>(), shape.vectors(), Share::of(client, shape));
    // SAFETY: every cube stays in its group, and the buffers hold all of them.
    unsafe {
        launch_kernel!(gated_norm<E>, client, CubeCount::Static(shape.rows as u32, shape.groups as u32, 1),
            share.cube.dim();
            buffer("x", x, vectors, vector)?, buffer("gate", gate, vectors, vector)?,
            buffer("weight", weight, vectors / shape.rows, vector)?, buffer("y", y, vectors, vector)?;
            eps, 1.0 / shape.features as f32, shape.groups as u32; share)
    };
    Ok(())
}

/// The gradients of `x`, of `gate` (type `E`), and of the weight (fp32) in [`forward`], given that of `y`. Deterministic.
pub fn backward<E: Float>(
    client: &Client,
    [x, gate, weight]: [&Handle; 3],
    dy: &Handle,
    [x_gradient, gate_gradient, weight_gradient]: [&Handle; 3],
    eps: f32,
    shape: GatedShape,
) -> Result<(), PointwiseError> {
    shape.check()?;
    let (vector, vectors, share) = (8 * size_of::<E>(), shape.vectors(), Share::of(client, shape));
    let (runs, features) = (shape.rows.div_ceil(RUN as usize), shape.groups * shape.features);
    let partials = client.empty(4 * runs * features);
    let of_rows = |name, handle| buffer(name, handle, vectors, vector);
    // SAFETY: every cube stays in its group and its row of partial sums, and the buffers hold all of them.
    unsafe {
        launch_kernel!(gated_norm_gradients<E>, client, CubeCount::Static(runs as u32, shape.groups as u32, 1),
            share.cube.dim();
            of_rows("x", x)?, of_rows("gate", gate)?, buffer("weight", weight, features / 8, vector)?,
            of_rows("dy", dy)?, of_rows("x_gradient", x_gradient)?, of_rows("gate_gradient", gate_gradient)?,
            buffer("parts", &partials, runs * features / 4, 16)?;
            eps, 1.0 / shape.features as f32, shape.rows as u32, shape.groups as u32, RUN; share)
    };
    sum_partials(client, &partials, weight_gradient, runs, features)
}
