//! Sinks of attention: a score of each query head that takes part in the softmax and has no value (gpt-oss). They change
//! output and log-sum-exp of the keys, whichever kernel has computed them.
use super::{CubeShape, MOST, PointwiseError, buffer, check};
use crate::hopper::ptx;
use cubecl::prelude::*;
use cubecl::server::Handle;

const LOG2_E: f32 = core::f32::consts::LOG2_E;
const LN_2: f32 = core::f32::consts::LN_2;

/// Sizes of an output `[seq, batch, heads, head_dim]` without gaps, and of its log-sum-exp `[batch, heads, stride]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SinkShape {
    /// Queries.
    pub seq: usize,
    /// Sequences.
    pub batch: usize,
    /// Query heads.
    pub heads: usize,
    /// Length of a head.
    pub head_dim: usize,
    /// Row length of the log-sum-exp, at least `seq`.
    pub stride: usize,
}

impl SinkShape {
    /// Whether there are kernels for this shape.
    pub fn has_kernel(&self) -> bool {
        self.check().is_ok()
    }

    fn check(&self) -> Result<(), PointwiseError> {
        let Self { seq, batch, heads, head_dim, stride } = *self;
        check("features of all heads", heads * head_dim, 1, 1 << 24)?;
        check("positions", seq * batch, 1, MOST / (heads * head_dim))?;
        check("row of the log-sum-exp", stride, 1, MOST / (batch * heads))
    }

    /// Positions of all sequences.
    fn rows(&self) -> usize {
        self.seq * self.batch
    }

    /// Numbers of a vector of all these tensors of elements of `size` bytes.
    fn lanes(&self, size: usize, tensors: &[&Handle]) -> usize {
        let aligned = |lanes: usize| {
            tensors.iter().all(|handle| handle.offset_start.unwrap_or(0).is_multiple_of((lanes * size) as u64))
        };
        [8, 4, 2].into_iter().find(|lanes| self.head_dim.is_multiple_of(*lanes) && aligned(*lanes)).unwrap_or(1)
    }
}

/// Place of a head's log-sum-exp at position `row` of all sequences.
#[cube]
fn statistic(row: u32, head: u32, batch: u32, heads: u32, stride: u32) -> usize {
    ((row % batch * heads + head) * stride + row / batch) as usize
}

/// Cube `(row, vectors)`.
#[cube(launch_unchecked)]
pub fn add_sinks<E: Float, N: Size>(
    out: &mut [Vector<E, N>],
    lse: &[f32],
    sinks: &[f32],
    total: &mut [f32],
    width: u32,
    batch: u32,
    heads: u32,
    stride: u32,
) {
    let column = CUBE_POS_Y * CUBE_DIM_X + UNIT_POS;
    if column < heads * width {
        let head = column / width;
        let place = statistic(CUBE_POS_X, head, batch, heads, stride);
        let (of_keys, sink) = (lse[place], sinks[head as usize]);
        let top = max(of_keys, sink);
        let all = top + ptx::log2(ptx::exp2((of_keys - top) * LOG2_E) + ptx::exp2((sink - top) * LOG2_E)) * LN_2;
        let share = ptx::exp2((of_keys - all) * LOG2_E);
        let at = (CUBE_POS_X * heads * width + column) as usize;
        let value = Vector::<f32, N>::cast_from(out[at]) * Vector::<f32, N>::new(share);
        out[at] = Vector::<E, N>::cast_from(value);
        if column % width == 0 {
            total[place] = all;
        }
    }
}

/// How the heads of a position are distributed over a cube's units.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Share {
    /// Units of a head, a power of two.
    units: u32,
    /// Vectors of a unit.
    vectors: u32,
    /// Numbers of a vector.
    lanes: u32,
}

impl Share {
    /// Of heads of `width` vectors.
    pub fn of(cube: CubeShape, width: usize, lanes: usize) -> Self {
        let units = (1 << width.trailing_zeros()).min(cube.plane);
        Self { units, vectors: width as u32 / units, lanes: lanes as u32 }
    }
}

/// `-p Σ out · gradient` of each head and position, where `p` is the sink's probability.
#[cube(launch_unchecked)]
pub fn sink_terms<E: Float, N: Size>(
    out: &[Vector<E, N>],
    gradient: &[Vector<E, N>],
    lse: &[f32],
    sinks: &[f32],
    terms: &mut [f32],
    rows: u32,
    batch: u32,
    heads: u32,
    stride: u32,
    #[comptime] share: Share,
) {
    let unit = UNIT_POS % comptime![share.units];
    let own = (CUBE_POS_X * CUBE_DIM_X + UNIT_POS) / comptime![share.units];
    // Past the last head it is read again: the units of a plane add up together.
    let at = min(own, rows * heads - 1);
    let first = at * comptime![share.units * share.vectors] + unit;
    let mut total = 0.0f32;
    #[unroll]
    for v in 0..comptime![share.vectors] {
        let place = (first + comptime![v * share.units]) as usize;
        let (a, b) = (out[place], gradient[place]);
        #[unroll]
        for i in 0..comptime![share.lanes as usize] {
            total += f32::cast_from(a.extract(i)) * f32::cast_from(b.extract(i));
        }
    }
    #[unroll]
    for i in 0..comptime![share.units.ilog2()] {
        total += plane_shuffle_xor(total, comptime![1u32 << i]);
    }
    if unit == 0 && own < rows * heads {
        let (row, head) = (at / heads, at % heads);
        let score = sinks[head as usize] - lse[statistic(row, head, batch, heads, stride)];
        terms[own as usize] = -ptx::exp2(score * LOG2_E) * total;
    }
}

/// Takes the sinks `[heads]`, fp32, into the softmax whose output of keys is `out`, of type `E`, and whose log-sum-exp
/// is `lse`, fp32: scales `out` in place and writes the log-sum-exp with them to `total`.
///
/// # Errors
/// If there is no kernel for the shape, or a buffer is too short.
pub fn add<E: Float>(
    client: &Client,
    out: &Handle,
    [lse, sinks, total]: [&Handle; 3],
    shape: SinkShape,
) -> Result<(), PointwiseError> {
    shape.check()?;
    let SinkShape { batch, heads, head_dim, stride, .. } = shape;
    let lanes = shape.lanes(size_of::<E>(), &[out]);
    let (rows, width) = (shape.rows(), head_dim / lanes);
    let cube = CubeShape::of(client).fitting(heads * width);
    let out = buffer("out", out, rows * heads * width, lanes * size_of::<E>())?;
    let statistics = |name, handle| buffer(name, handle, batch * heads * stride, 4);
    let (lse, total) = (statistics("the log-sum-exp", lse)?, statistics("the new log-sum-exp", total)?);
    let sinks = buffer("sinks", sinks, heads, 4)?;
    // SAFETY: units past the last vector of a position do nothing, and the buffers hold all positions.
    unsafe {
        launch_kernel!(add_sinks<E>, client, cube.rows(rows, heads * width), cube.dim(), lanes;
            out, lse, sinks, total; width as u32, batch as u32, heads as u32, stride as u32)
    };
    Ok(())
}

/// Of each position and head, `terms [seq, batch, heads]` of fp32, what the sum over all positions is the gradient
/// of the head's sink; `out` and `lse` are those with the sinks.
///
/// # Errors
/// As [`add`].
pub fn gradient_terms<E: Float>(
    client: &Client,
    [out, gradient]: [&Handle; 2],
    [lse, sinks, terms]: [&Handle; 3],
    shape: SinkShape,
) -> Result<(), PointwiseError> {
    shape.check()?;
    let SinkShape { batch, heads, head_dim, stride, .. } = shape;
    let lanes = shape.lanes(size_of::<E>(), &[out, gradient]);
    let (rows, width, bytes) = (shape.rows(), head_dim / lanes, lanes * size_of::<E>());
    let cube = CubeShape::of(client);
    let share = Share::of(cube, width, lanes);
    let vectors = rows * heads * width;
    let (out, gradient) = (buffer("out", out, vectors, bytes)?, buffer("gradient", gradient, vectors, bytes)?);
    let (lse, sinks) = (buffer("the log-sum-exp", lse, batch * heads * stride, 4)?, buffer("sinks", sinks, heads, 4)?);
    let terms = buffer("terms", terms, rows * heads, 4)?;
    // SAFETY: units past the last head read the last and write nothing, and the buffers hold all positions.
    unsafe {
        launch_kernel!(sink_terms<E>, client, cube.line(rows * heads * share.units as usize), cube.dim(), lanes;
            out, gradient, lse, sinks, terms; rows as u32, batch as u32, heads as u32, stride as u32; share)
    };
    Ok(())
}
