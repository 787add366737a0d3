//! The sizes of a call, whether there are kernels for them, and the launch.
use super::kernel::{SizesLaunch, UNITS, grouped};
use super::maps;
use super::plan::{Epilogue, Gemm, GroupedPlan};
use super::tiles::{self, DEPTH, ROWS, WORDS};
use crate::hopper::mma::Half;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::bf16;

/// Why a call was refused. Nothing has been launched then.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum GroupedError {
    /// The device has no warpgroup MMA or no tensor maps, or CubeCL was built without its LLVM compiler.
    #[error(
        "this device (or this build of CubeCL) has no warpgroup MMA on 16-bit numbers; these kernels need a Hopper GPU"
    )]
    Device,
    /// A size the kernels do not handle.
    #[error("{what} is {found}: it must be a multiple of {multiple} from {multiple} to {most}")]
    Size { what: &'static str, found: usize, multiple: usize, most: usize },
    /// A group whose rows do not fill tiles.
    #[error("group {group} has {rows} rows: they must be a multiple of {ROWS}; pad with rows of zeros")]
    Rows { group: usize, rows: usize },
    /// A buffer that is too small.
    #[error("the buffer of {name} has {found} bytes, {expected} are needed")]
    Buffer { name: &'static str, found: u64, expected: u64 },
    /// A buffer that starts at an address that TMA does not support.
    #[error("{name} starts {offset} bytes into its memory: it must be a multiple of 16")]
    Start { name: &'static str, offset: u64 },
}

/// Sizes of the GEMMs of a layer of groups (experts).
#[derive(Clone, Copy, Debug)]
pub struct GroupedCall<'a> {
    /// Rows of each group, multiples of [`ROWS`] or zero.
    pub counts: &'a [usize],
    /// Rows of a group's matrix, a multiple of 64.
    pub features: usize,
    /// Columns of a group's matrix, a multiple of 8.
    pub inner: usize,
    /// Type of the inputs.
    pub element: Half,
    /// Cubes, at the most, as a multiple of those that fit on the device. Tiles are assigned to cubes statically: one that
    /// finds no free SM, because another kernel runs there, delays all of its tiles, and smaller cubes balance that. The
    /// bits are the same.
    pub waves: u32,
}

impl GroupedCall<'_> {
    /// Rows of all groups.
    pub fn rows(&self) -> usize {
        self.counts.iter().sum()
    }

    /// Whether the device of `client` has kernels for these GEMMs.
    ///
    /// # Errors
    /// Why not. A caller then computes one GEMM for each group.
    pub fn check(&self, client: &Client) -> Result<(), GroupedError> {
        if client.features().matmul.wgmma.is_empty() {
            return Err(GroupedError::Device);
        }
        self.check_sizes()
    }

    fn check_sizes(&self) -> Result<(), GroupedError> {
        // Positions and numbers of tiles are signed 32-bit numbers.
        let most = i32::MAX as usize;
        let sizes = [
            ("the number of groups", self.counts.len(), 1),
            ("features", self.features, DEPTH),
            ("inner", self.inner, 8),
            ("the number of all rows", self.rows(), 1),
            ("the number of rows of all matrices", self.counts.len() * self.features, DEPTH),
            ("the number of tiles of all gradients", self.counts.len() * self.features * self.inner / DEPTH / DEPTH, 1),
            ("the number of tiles of all results", self.rows() * self.features.max(self.inner) / DEPTH / DEPTH, 1),
        ];
        for (what, found, multiple) in sizes {
            if found == 0 || !found.is_multiple_of(multiple) || found > most {
                return Err(GroupedError::Size { what, found, multiple, most });
            }
        }
        match self.counts.iter().position(|rows| !rows.is_multiple_of(ROWS)) {
            Some(group) => Err(GroupedError::Rows { group, rows: self.counts[group] }),
            None => Ok(()),
        }
    }

    /// `out [rows, features] = x wᵀ`, each row with the matrix of its group: `x [rows, inner]`, `w [groups · features,
    /// inner]`, all without gaps and of the type of the call.
    ///
    /// # Errors
    /// As [`check`](Self::check), or if a buffer is too small or starts at no multiple of 16 bytes.
    pub fn forward(&self, client: &Client, x: &Handle, w: &Handle, out: &Handle) -> Result<(), GroupedError> {
        let plan = GroupedPlan::fastest(Gemm::Forward, self.element, Epilogue::InputType, self.features);
        self.launch(client, [x, w, out], plan)
    }

    /// [`forward`](Self::forward) plus the bias of each row's group, of `bias [groups · features]` of the type of the
    /// call, times the row's factor, of `factors [rows]` of fp32; rounded once.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn forward_biased(
        &self,
        client: &Client,
        [x, w, out]: [&Handle; 3],
        bias @ [values, factors]: [&Handle; 2],
    ) -> Result<(), GroupedError> {
        fits("the bias", values, 2 * self.counts.len() * self.features)?;
        fits("the factors", factors, 4 * self.rows())?;
        let plan = GroupedPlan::fastest(Gemm::Forward, self.element, Epilogue::Biased, self.features);
        self.launch_with(client, [x, w, out], Some(bias), plan)
    }

    /// `out [rows, inner] = gradient w` for `gradient [rows, features]`.
    pub fn input_gradient(
        &self,
        client: &Client,
        gradient: &Handle,
        w: &Handle,
        out: &Handle,
    ) -> Result<(), GroupedError> {
        let plan = GroupedPlan::fastest(Gemm::InputGradient, self.element, Epilogue::InputType, self.inner);
        self.launch(client, [gradient, w, out], plan)
    }

    /// `gradientᵀ x` over the rows of each group, one below the other: `out [groups · features, inner]`. A group
    /// without rows gets zeros; [`Epilogue::AddFp32`] leaves its part as it is. Each number is added to once, so two
    /// calls give the same bits.
    pub fn weight_gradient(
        &self,
        client: &Client,
        gradient: &Handle,
        x: &Handle,
        out: &Handle,
        epilogue: Epilogue,
    ) -> Result<(), GroupedError> {
        let plan = GroupedPlan::fastest(Gemm::WeightGradient, self.element, epilogue, self.inner);
        self.launch(client, [gradient, x, out], plan)
    }

    /// Any of the GEMMs with an explicit plan, for measurements.
    pub fn launch(&self, client: &Client, operands: [&Handle; 3], plan: GroupedPlan) -> Result<(), GroupedError> {
        self.launch_with(client, operands, None, plan)
    }

    fn launch_with(
        &self,
        client: &Client,
        [left, right, out]: [&Handle; 3],
        bias: Option<[&Handle; 2]>,
        plan: GroupedPlan,
    ) -> Result<(), GroupedError> {
        self.check(client)?;
        let Self { counts, features, inner, .. } = *self;
        let (rows, matrices) = (self.rows(), [counts.len() * features, inner]);
        let (x, y) = ([rows, inner], [rows, features]);
        let (left_shape, right_shape, result) = match plan.gemm {
            Gemm::Forward => (x, matrices, [1, rows, features]),
            Gemm::InputGradient => (y, matrices, [1, rows, inner]),
            Gemm::WeightGradient => (y, x, [counts.len(), features, inner]),
        };
        for (name, handle, bytes) in [
            ("the left operand", left, 2 * left_shape.iter().product::<usize>()),
            ("the right operand", right, 2 * right_shape.iter().product::<usize>()),
            ("the result", out, plan.result_bytes() * result.iter().product::<usize>()),
        ] {
            fits(name, handle, bytes)?;
        }
        let columns = result[2].div_ceil(plan.width);
        let (table, row_tiles) = match plan.gemm {
            Gemm::WeightGradient => {
                (tiles::groups(counts, DEPTH, plan.epilogue != Epilogue::AddFp32), features.div_ceil(ROWS))
            }
            _ => (tiles::rows(counts), 1),
        };
        let count = table.len() / WORDS * row_tiles * columns;
        if count == 0 {
            return Ok(());
        }
        let words = table.len();
        let table = client.create_from_slice(&table.into_iter().flat_map(u32::to_le_bytes).collect::<Vec<_>>());
        let steps = if plan.gemm == Gemm::Forward { inner } else { features }.div_ceil(DEPTH);
        let sizes = SizesLaunch::new(count as u32, columns as u32, row_tiles as u32, features as u32, steps as u32);
        let sms = client.properties().hardware.num_streaming_multiprocessors;
        let sms = sms.expect("GPUs with warpgroup MMA report their SMs");
        let cubes = (count as u32).min(sms * plan.cubes() * self.waves.max(1));
        let (left, right) = (maps::left(left, left_shape, plan), maps::right(right, right_shape, plan));
        let out = maps::result(out, result, plan);
        let (count, units) = (CubeCount::Static(cubes, 1, 1), CubeDim::new_1d(UNITS));
        // SAFETY: the tensor maps bound every access but those to the table, which has an entry for every tile.
        unsafe {
            let table = || BufferArg::from_raw_parts(table.clone(), words);
            let [bias, factors] = match bias {
                Some([bias, factors]) => [(bias, self.counts.len() * features / 2), (factors, rows)]
                    .map(|(handle, len)| BufferArg::from_raw_parts(handle.clone(), len)),
                // Not read.
                None => [table(), table()],
            };
            let table = table();
            macro_rules! launch {
                ($out:ty) => {
                    grouped::launch_unchecked::<$out>(
                        client, count, units, left, right, out, table, bias, factors, sizes, plan,
                    )
                };
            }
            if plan.result_bytes() == 2 { launch!(bf16) } else { launch!(f32) }
        }
        Ok(())
    }
}

pub(super) fn fits(name: &'static str, handle: &Handle, bytes: usize) -> Result<(), GroupedError> {
    let (found, expected) = (handle.size_in_used(), bytes as u64);
    if found < expected {
        return Err(GroupedError::Buffer { name, found, expected });
    }
    match handle.offset_start.unwrap_or(0) {
        offset if offset.is_multiple_of(16) => Ok(()),
        offset => Err(GroupedError::Start { name, offset }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(counts: &[usize], features: usize, inner: usize) -> Option<GroupedError> {
        GroupedCall { counts, features, inner, element: Half::Bf16, waves: 1 }.check_sizes().err()
    }

    #[test]
    fn sizes_that_do_not_fill_tiles_are_refused() {
        assert_eq!(refusal(&[128, 0, 384], 1536, 2048), None);
        assert_eq!(refusal(&[128, 0, 384], 192, 72), None);
        assert_eq!(refusal(&[128, 130], 64, 64), Some(GroupedError::Rows { group: 1, rows: 130 }));
        let refused = |counts: &[usize], features, inner| match refusal(counts, features, inner) {
            Some(GroupedError::Size { what, .. }) => what,
            other => panic!("{other:?}"),
        };
        assert_eq!(refused(&[128], 96, 64), "features");
        assert_eq!(refused(&[128], 64, 68), "inner");
        assert_eq!(refused(&[], 64, 64), "the number of groups");
        assert_eq!(refused(&[0, 0], 64, 64), "the number of all rows");
    }
}
