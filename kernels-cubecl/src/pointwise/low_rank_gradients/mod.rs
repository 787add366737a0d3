//! The gradients of `x` and `w` in `y = x · wᵀ` where a row of `x` is short, as for adapters: both from one read of the wide
//! gradient of `y`, whose bytes are the time of either.
mod kernel;
mod operands;
mod sums;

use super::{PointwiseError, buffer, check};
use crate::attention::portable::mma::has_mma;
use crate::fp8::Format;
use crate::fp8::amax::reduce;
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl::wgmma::Swizzle;
pub use kernel::low_rank_gradients;
use operands::{PANEL, ROWS};
pub use sums::add_parts;

/// Sizes of `dy [rows, columns]`, `x [rows, inner]` and `w [columns, inner]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LowRankGradients {
    /// Rows of `x` and `dy`.
    pub rows: usize,
    /// Columns of `dy`.
    pub columns: usize,
    /// Columns of `w`.
    pub inner: usize,
    /// `x` is `[rows, blocks inner]`: each of so many equal parts of the columns of `y` reads columns of its own.
    pub blocks: usize,
}

/// What is known when the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Plan {
    /// Sixteens of columns of `w`: one or two.
    pub steps: usize,
    /// As [`LowRankGradients::blocks`].
    pub blocks: usize,
    /// Planes of a cube.
    pub planes: usize,
    /// Tiles of a plane in flight.
    pub stages: usize,
    /// What else is made of `dy`.
    pub out: Out,
}

/// What a layer in FP8 needs of a tensor, from the same read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Out {
    /// Nothing.
    None,
    /// The greatest magnitude.
    Amax,
    /// A cast by rows.
    Cast(Format),
}

impl Plan {
    fn is_cast(self) -> bool {
        matches!(self.out, Out::Cast(_))
    }

    /// 64 columns each of a plane's tile, so many that sums for `w` are in 64 registers.
    fn panels(self) -> usize {
        2 / self.steps
    }

    /// Columns of a cube.
    fn columns(self) -> usize {
        self.planes * self.panels() * PANEL
    }
}

/// Where [`Out`] is written.
#[derive(Clone, Copy, Debug)]
pub enum ForFp8<'a> {
    /// Nowhere.
    Nothing,
    /// The amax, `[1]` in fp32.
    Amax(&'a Handle),
    /// The cast of `dy · scale`, one byte a number.
    Cast {
        /// `[1]` in fp32.
        scale: &'a Handle,
        /// `[rows, columns]`.
        to: &'a Handle,
        /// The format.
        format: Format,
    },
}

/// Where the gradient of `w` is written.
#[derive(Clone, Copy, Debug)]
pub enum OfWeight<'a> {
    /// A tensor of the type of the operands.
    Rounded(&'a Handle),
    /// Added to an fp32 tensor, or in the place of its numbers.
    Sum {
        /// The tensor.
        sum: &'a Handle,
        /// Whether it is added.
        add: bool,
    },
}

impl LowRankGradients {
    /// Whether there is a kernel: rows in 16s, 16 or 32 columns of `w`, and columns of `dy` in 256s (128s) of each block;
    /// and a device with `mma.sync` and tensor maps.
    pub fn has_kernel<E: Float>(&self, client: &Client) -> bool {
        self.plan(Out::None).is_some() && has_mma::<E>(client) && !client.features().matmul.wgmma.is_empty()
    }

    fn plan(&self, out: Out) -> Option<Plan> {
        let Self { rows, columns, inner, blocks } = *self;
        // Positions are 32-bit numbers.
        let most = i32::MAX as usize;
        let positions = rows.checked_mul(columns.checked_mul(blocks)?)?;
        let fits = check("rows", rows, ROWS, most / 64).is_ok() && check("columns", columns, 1, 1 << 18).is_ok();
        if !fits || positions > 16 * most || blocks == 0 || !columns.is_multiple_of(blocks) {
            return None;
        }
        let steps = [16, 32].iter().position(|short| *short == inner)? + 1;
        let plans = [8, 4, 2].map(|planes| Plan { steps, blocks, planes, stages: 3 * steps, out });
        plans.into_iter().find(|plan| (columns / blocks).is_multiple_of(plan.columns()))
    }
}

/// Parts of the rows, so many that the cubes fill the SMs once, or twice if a tenth of the SMs would be idle the first time.
fn splits(sms: usize, bands: usize, plan: Plan) -> usize {
    let fit = sms * 8 / plan.planes;
    let once = fit / bands;
    if 10 * once * bands >= 9 * fit { once } else { (2 * fit / bands).max(1) }
}

/// `dx = dy · w [rows, blocks inner]` and `dw = dyᵀ · x [columns, inner]` of `dy`, `x` and `w` of type `E` (2 bytes) without
/// gaps, sums in fp32, always in the same order; and what a layer in FP8 needs of `dy`.
///
/// # Errors
/// If there is no kernel for these sizes, or a buffer is too small.
pub fn gradients<E: Float>(
    client: &Client,
    sizes: LowRankGradients,
    [dy, x, w, dx]: [&Handle; 4],
    dw: OfWeight,
    for_fp8: ForFp8,
) -> Result<(), PointwiseError> {
    let LowRankGradients { rows, columns, inner, blocks } = sizes;
    let out = match for_fp8 {
        ForFp8::Nothing => Out::None,
        ForFp8::Amax(_) => Out::Amax,
        ForFp8::Cast { format, .. } => Out::Cast(format),
    };
    let plan = sizes.plan(out).filter(|_| sizes.has_kernel::<E>(client));
    let Some(plan) = plan else { return Err(PointwiseError::Shape { shape: format!("{sizes:?}") }) };
    let bands = columns / plan.columns();
    let sms = client.properties().hardware.num_streaming_multiprocessors.unwrap_or(132) as usize;
    let splits = splits(sms, bands, plan).min(rows / ROWS);
    let parts_of_dx = client.empty(4 * bands * rows * inner);
    let parts_of_dw = client.empty(4 * splits * columns * inner);
    let maxima = client.empty(4 * bands * splits);
    let bytes = size_of::<E>();
    buffer("dy", dy, rows * columns, bytes)?;
    // SAFETY: the buffer is as large.
    let arg = unsafe { TensorArg::from_raw_parts(dy.clone(), [columns, 1].into(), [rows, columns].into()) };
    let tiles = TiledArgs { tile_size: [ROWS, PANEL].into() };
    let map = TensorMapArg::new(tiles, arg, E::elem_type_native()).with_swizzle(Swizzle::B128.into());
    let map = map.with_prefetch(TensorMapPrefetch::B256);
    let x = buffer("x", x, rows * blocks * inner, bytes)?;
    let w = buffer("w", w, columns * inner, bytes)?;
    let of_dx = buffer("parts of dx", &parts_of_dx, bands * rows * inner / 2, 8)?;
    let of_dw = buffer("parts of dw", &parts_of_dw, splits * columns * inner / 2, 8)?;
    let found = buffer("maxima", &maxima, bands * splits, 4)?;
    let (scale, cast, lines) = match for_fp8 {
        ForFp8::Cast { scale, to, .. } => (scale, to, rows * columns / 16),
        _ => (&maxima, &parts_of_dx, 1),
    };
    let (scale, cast) = (buffer("scale", scale, 1, 4)?, buffer("cast", cast, lines, 16)?);
    let cubes = CubeCount::Static(bands as u32, splits as u32, 1);
    let (of_block, dim) = ((bands / blocks) as u32, CubeDim::new_1d(32 * plan.planes as u32));
    // SAFETY: cubes divide the columns without a rest and go through the rows, and the buffers hold them.
    unsafe {
        launch_kernel!(low_rank_gradients<E>, client, cubes, dim;
            map, x, w, scale, of_dx, of_dw, found, cast; rows as u32, columns as u32, of_block; plan)
    };
    sums::sum::<E>(
        client,
        &parts_of_dx,
        dx,
        sums::Parts { count: bands / blocks, len: rows * inner, inner, blocks },
        false,
    )?;
    let of_dw = sums::Parts { count: splits, len: columns * inner, inner, blocks: 1 };
    match dw {
        OfWeight::Rounded(dw) => sums::sum::<E>(client, &parts_of_dw, dw, of_dw, false)?,
        OfWeight::Sum { sum, add } => sums::sum::<f32>(client, &parts_of_dw, sum, of_dw, add)?,
    }
    match for_fp8 {
        ForFp8::Amax(amax) => reduce(client, &maxima, amax, bands * splits),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(rows: usize, columns: usize, inner: usize, blocks: usize) -> LowRankGradients {
        LowRankGradients { rows, columns, inner, blocks }
    }

    #[test]
    fn columns_decide_how_many_planes_a_cube_has() {
        let planes = |sizes: LowRankGradients| sizes.plan(Out::None).map(|plan| (plan.planes, plan.stages));
        assert_eq!(planes(sizes(16_384, 28_672, 16, 2)), Some((8, 3)));
        assert_eq!(planes(sizes(16, 11_008, 16, 1)), Some((2, 3)));
        assert_eq!(planes(sizes(32, 1536, 32, 1)), Some((8, 6)));
        let refused = [
            sizes(8, 4096, 16, 1),
            sizes(16, 4000, 16, 1),
            sizes(16, 4096, 48, 1),
            sizes(16, 4096, 16, 0),
            sizes(16, 0, 16, 1),
            sizes(1 << 24, 28_672, 16, 1),
            sizes(usize::MAX / 16 * 16, 4096, 16, 1),
        ];
        assert_eq!(refused.map(planes), [None; 7]);
    }

    #[test]
    fn cubes_fill_the_gpu_once_or_twice() {
        let plan = sizes(16_384, 28_672, 16, 2).plan(Out::None).expect("a kernel");
        assert_eq!([4, 28, 132, 500].map(|bands| splits(132, bands, plan)), [33, 9, 1, 1]);
    }
}
