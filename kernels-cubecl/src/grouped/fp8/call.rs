//! The sizes of a call, whether there are kernels for them, and the launch.
use super::kernel::grouped_fp8;
use super::plan::{Fp8Plan, Scaling, Sums};
use super::scales::{self, APART};
use crate::fp8::{BLOCK, Format, Granularity};
use crate::grouped::call::{GroupedError, fits};
use crate::grouped::kernel::{SizesLaunch, UNITS};
use crate::grouped::maps;
use crate::grouped::plan::{Epilogue, Gemm};
use crate::grouped::tiles::{self, DEPTH, ROWS, WORDS};
use crate::hopper::mma::Half;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::bf16;

/// Sizes of the GEMMs of a layer of groups (experts).
#[derive(Clone, Copy, Debug)]
pub struct Fp8Call<'a> {
    /// Rows of each group, multiples of [`ROWS`] or zero.
    pub counts: &'a [usize],
    /// Matrices; each has as many groups, one after the other.
    pub matrices: usize,
}

/// Groups of FP8 numbers.
#[derive(Clone, Copy, Debug)]
pub struct Fp8Operand<'a> {
    /// The numbers, a byte each.
    pub bytes: &'a Handle,
    /// The reciprocals of the scales that the numbers were cast with, fp32: [`APART`] numbers for each group or matrix, of
    /// which the first counts, or those of blocks in the order of [`Granularity::scales`].
    pub scales: &'a Handle,
    /// Their format.
    pub format: Format,
}

impl Fp8Call<'_> {
    /// Rows of all groups.
    fn rows(&self) -> usize {
        self.counts.iter().sum()
    }

    /// Whether the device of `client` has kernels for these groups and matrices of `sides` rows and columns.
    ///
    /// # Errors
    /// Why not. A caller then computes one GEMM for each group.
    pub fn check(&self, client: &Client, sides: [usize; 2], scaling: Scaling) -> Result<(), GroupedError> {
        if client.features().matmul.wgmma.is_empty() {
            return Err(GroupedError::Device);
        }
        self.check_sizes(sides, scaling)
    }

    fn check_sizes(&self, [features, inner]: [usize; 2], scaling: Scaling) -> Result<(), GroupedError> {
        // Positions and numbers of tiles are signed 32-bit numbers.
        let (most, rows, matrices) = (i32::MAX as usize, self.rows(), self.matrices);
        let multiple = if scaling == Scaling::Blocks { BLOCK } else { 16 };
        for (what, found, multiple) in [
            ("the number of matrices", matrices, 1),
            ("features", features, multiple),
            ("inner", inner, multiple),
            ("the number of all rows", rows, 1),
            ("the number of rows of all matrices", matrices * features.max(inner), 1),
            ("the number of scales", rows / ROWS * features.max(inner), 1),
            ("the number of tiles of all gradients", matrices * features.div_ceil(ROWS) * inner.div_ceil(ROWS), 1),
        ] {
            if found == 0 || !found.is_multiple_of(multiple) || found > most {
                return Err(GroupedError::Size { what, found, multiple, most });
            }
        }
        match self.counts.iter().position(|rows| !rows.is_multiple_of(ROWS)) {
            Some(group) => Err(GroupedError::Rows { group, rows: self.counts[group] }),
            None => Ok(()),
        }
    }

    /// `out [rows, features] = x wᵀ` of `element`, each row with the matrix of its group: `x [rows, inner]`, `w
    /// [matrices · features, inner]`, without gaps, with scales of groups and matrices.
    ///
    /// # Errors
    /// As [`check`](Self::check), or if a buffer is too small or starts at no multiple of 16 bytes.
    pub fn multiply(
        &self,
        client: &Client,
        operands @ [x, w]: [Fp8Operand; 2],
        (out, element): (&Handle, Half),
        sides: [usize; 2],
        sums: Sums,
    ) -> Result<(), GroupedError> {
        let base = (element, Epilogue::InputType);
        let plan = Fp8Plan::new(Gemm::Forward, [x.format, w.format], (Scaling::Groups, sums), base);
        self.launch(client, operands, out, sides, plan)
    }

    /// [`multiply`](Self::multiply) with scales of blocks.
    ///
    /// # Errors
    /// As [`multiply`](Self::multiply).
    pub fn multiply_blocks(
        &self,
        client: &Client,
        operands @ [x, w]: [Fp8Operand; 2],
        (out, element): (&Handle, Half),
        sides: [usize; 2],
    ) -> Result<(), GroupedError> {
        let (how, base) = ((Scaling::Blocks, Sums::Exact), (element, Epilogue::InputType));
        self.launch(client, operands, out, sides, Fp8Plan::new(Gemm::Forward, [x.format, w.format], how, base))
    }

    /// `gradientᵀ x` over the rows of all groups of each matrix, one below the other: `out [matrices · features, inner]`,
    /// fp32, of both transposes, `[features, rows]` and `[inner, rows]`. A matrix without rows gets zeros; with `add` it stays
    /// as it is. Each number is added to once, so two calls give the same bits.
    ///
    /// # Errors
    /// As [`multiply`](Self::multiply).
    pub fn weight_gradient(
        &self,
        client: &Client,
        operands @ [gradient, x]: [Fp8Operand; 2],
        (out, add): (&Handle, bool),
        sides: [usize; 2],
        scaling: Scaling,
    ) -> Result<(), GroupedError> {
        let base = (Half::Bf16, if add { Epilogue::AddFp32 } else { Epilogue::Fp32 });
        let plan = Fp8Plan::new(Gemm::WeightGradient, [gradient.format, x.format], (scaling, Sums::Exact), base);
        self.launch(client, operands, out, sides, plan)
    }

    fn launch(
        &self,
        client: &Client,
        [left, right]: [Fp8Operand; 2],
        out: &Handle,
        sides @ [features, inner]: [usize; 2],
        plan: Fp8Plan,
    ) -> Result<(), GroupedError> {
        self.check(client, sides, plan.scaling)?;
        let Self { counts, matrices, .. } = *self;
        let (rows, base, is_gradient) = (self.rows(), plan.base, plan.base.gemm == Gemm::WeightGradient);
        let (of_left, of_right, result) = match is_gradient {
            true => ([features, rows], [inner, rows], [matrices, features, inner]),
            false => ([rows, inner], [matrices * features, inner], [1, rows, features]),
        };
        let [left_scales, right_scales] = match plan.scaling {
            Scaling::Groups => [counts.len(), if is_gradient { counts.len() } else { matrices }].map(|n| [n, APART]),
            Scaling::Blocks => {
                let of_matrices = if is_gradient { Granularity::Vector } else { Granularity::Block };
                [Granularity::Vector.scales(of_left[0], of_left[1]), of_matrices.scales(of_right[0], of_right[1])]
            }
        };
        let numbers = |shape: &[usize]| shape.iter().product::<usize>();
        for (name, handle, bytes) in [
            ("the left operand", left.bytes, numbers(&of_left)),
            ("the right operand", right.bytes, numbers(&of_right)),
            ("the scales of the left operand", left.scales, 4 * numbers(&left_scales)),
            ("the scales of the right operand", right.scales, 4 * numbers(&right_scales)),
            ("the result", out, base.result_bytes() * numbers(&result)),
        ] {
            fits(name, handle, bytes)?;
        }
        let columns = result[2].div_ceil(base.width);
        let of_matrices: Vec<usize> =
            counts.chunks(counts.len() / matrices).map(|counts| counts.iter().sum()).collect();
        let (table, row_tiles) = if is_gradient {
            (tiles::groups(&of_matrices, ROWS, base.epilogue != Epilogue::AddFp32), features.div_ceil(ROWS))
        } else {
            (tiles::rows(&of_matrices), 1)
        };
        let count = table.len() / WORDS * row_tiles * columns;
        if count == 0 {
            return Ok(());
        }
        // A matrix without rows reads past the last 128.
        let groups = counts.iter().enumerate().flat_map(|(group, rows)| vec![group as u32; rows / ROWS]).chain([0]);
        let upload = |words: &Vec<u32>| {
            client.create_from_slice(&words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>())
        };
        let steps = inner.div_ceil(2 * DEPTH);
        let sizes = SizesLaunch::new(count as u32, columns as u32, row_tiles as u32, features as u32, steps as u32);
        let sms = client.properties().hardware.num_streaming_multiprocessors;
        let sms = sms.expect("GPUs with warpgroup MMA report their SMs");
        let cubes = (count as u32).min(sms);
        // Those of groups are not read.
        let boxes = if plan.scaling == Scaling::Blocks { [BLOCK, scales::right_scales(plan)] } else { [APART; 2] };
        let left_blocks = maps::scales(left.scales, left_scales, boxes[0]);
        let right_blocks = maps::scales(right.scales, right_scales, boxes[1]);
        // In pairs of numbers.
        let map = |x: Fp8Operand, shape: &[usize; 2], lines| maps::operand(x.bytes, [shape[0], shape[1] / 2], lines);
        let (left_map, right_map) = (map(left, &of_left, ROWS), map(right, &of_right, base.width));
        let out = maps::result(out, result, base);
        let (count, units) = (CubeCount::Static(cubes, 1, 1), CubeDim::new_1d(UNITS));
        // SAFETY: the tensor maps bound every access but those to the tables, which have an entry for every tile and
        // every 128 rows, and to the scales, which were compared with the buffers.
        unsafe {
            let words = |words: &Vec<u32>| BufferArg::from_raw_parts(upload(words), words.len());
            let (table, groups) = (words(&table), words(&groups.collect()));
            let left_scales = BufferArg::from_raw_parts(left.scales.clone(), numbers(&left_scales));
            let right_scales = BufferArg::from_raw_parts(right.scales.clone(), numbers(&right_scales));
            macro_rules! launch {
                ($out:ty) => {
                    grouped_fp8::launch_unchecked::<$out>(
                        client,
                        count,
                        units,
                        left_map,
                        right_map,
                        left_blocks,
                        right_blocks,
                        out,
                        table,
                        groups,
                        left_scales,
                        right_scales,
                        sizes,
                        plan,
                    )
                };
            }
            if base.result_bytes() == 2 { launch!(bf16) } else { launch!(f32) }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_without_a_kernel_are_refused() {
        let refusal =
            |counts: &[usize], sides| Fp8Call { counts, matrices: 1 }.check_sizes(sides, Scaling::Groups).err();
        assert_eq!(refusal(&[128, 0, 384], [1536, 2048]), None);
        assert_eq!(refusal(&[128, 144], [64, 64]), Some(GroupedError::Rows { group: 1, rows: 144 }));
        for (sides, name) in [([1544, 2048], "features"), ([1536, 72], "inner")] {
            let found = refusal(&[128], sides);
            assert!(matches!(found, Some(GroupedError::Size { what, multiple: 16, .. }) if what == name), "{found:?}");
        }
        assert!(matches!(refusal(&[0], [16, 16]), Some(GroupedError::Size { what: "the number of all rows", .. })));
    }
}
