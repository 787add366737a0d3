//! Small sums with a residual addition and an RMSNorm behind them: the kernels, each loaded by its first call.

use super::layout::BLOCKS;
use super::norm_ptx::{self, THREADS, VECTORS};
use burn::tensor::DType;
use cudarc::driver::result as driver;
use parking_lot::Mutex;
use std::ffi::CString;

/// Sizes of a call: a block for each row, whose threads have the vectors of eight elements that they have in
/// `kernels_cubecl`'s norm.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NormedRows {
    pub dtype: DType,
    pub rows: usize,
    pub columns: usize,
    /// Threads of a row, and vectors of a thread.
    pub threads: usize,
    pub vectors: usize,
    /// Whether one is added to the weight.
    pub plus_one: bool,
}

/// The kernels that were called so far. Raw handles are stored as integers, because they cross threads.
pub(super) struct Norms {
    /// The major number of the compute capability.
    capability: i32,
    loaded: Mutex<Vec<Loaded>>,
}

struct Loaded {
    /// The index of the type, the vectors of a thread, and whether one is added to the weight.
    of: (usize, usize, bool),
    module: usize,
    kernel: usize,
}

impl NormedRows {
    /// Whether there is a kernel for them.
    pub fn has_kernel(&self) -> bool {
        let Self { dtype, rows, columns, threads, vectors, .. } = *self;
        let known = kind_of(dtype).is_some() && (1..=BLOCKS).contains(&rows);
        let warps = threads > 0 && threads.is_multiple_of(32) && threads <= THREADS;
        known
            && warps
            && (1..=VECTORS).contains(&vectors)
            && columns.is_multiple_of(8)
            // Every thread has a vector.
            && (threads..=threads * vectors).contains(&(columns / 8))
    }

    /// Bytes of all rows.
    pub fn bytes(&self) -> usize {
        self.rows * self.columns * self.dtype.size()
    }
}

impl Norms {
    pub fn new(capability: i32) -> Self {
        Self { capability, loaded: Mutex::default() }
    }

    /// Whether kernels prefetch.
    pub fn prefetch(&self) -> bool {
        self.capability >= 9
    }

    /// The kernel of a call, in the current context.
    pub fn kernel(&self, of: &NormedRows) -> Result<usize, String> {
        let kind = kind_of(of.dtype).ok_or_else(|| format!("no sum and norm of {:?}", of.dtype))?;
        let (mut loaded, of) = (self.loaded.lock(), (kind, of.vectors, of.plus_one));
        if let Some(known) = loaded.iter().find(|known| known.of == of) {
            return Ok(known.kernel);
        }
        let source = CString::new(norm_ptx::module(of, self.capability)).map_err(|error| error.to_string())?;
        let name = CString::new(norm_ptx::NAME).map_err(|error| error.to_string())?;
        // SAFETY: the image and the name end with a zero.
        let made = unsafe {
            driver::module::load_data(source.as_ptr().cast())
                .and_then(|module| Ok((module as usize, driver::module::get_function(module, name)? as usize)))
        };
        let (module, kernel) = made.map_err(|error| format!("the kernel of a small sum and its norm: {error}"))?;
        loaded.push(Loaded { of, module, kernel });
        Ok(kernel)
    }

    /// Unloads them, in the current context. No call is queued.
    pub fn unload(&self) {
        for Loaded { module, .. } in self.loaded.lock().drain(..) {
            // SAFETY: no kernel of the module is queued. What cannot be unloaded is a leak.
            let _ = unsafe { driver::module::unload(module as _) };
        }
    }
}

/// The index of a type among those of the kernels.
fn kind_of(dtype: DType) -> Option<usize> {
    Some(match dtype {
        DType::BF16 => 0,
        DType::F16 => 1,
        DType::F32 | DType::Flex32 => 2,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROWS: NormedRows =
        NormedRows { dtype: DType::BF16, rows: 1, columns: 4096, threads: 256, vectors: 2, plus_one: false };

    #[test]
    fn rows_that_the_threads_do_not_cover_have_no_kernel() {
        assert!(ROWS.has_kernel());
        for (columns, threads, vectors) in [(256, 32, 1), (12_296, 512, 4), (16_384, 512, 4), (1000, 64, 2)] {
            assert!(NormedRows { columns, threads, vectors, ..ROWS }.has_kernel(), "{columns}");
        }
        let refused = [
            NormedRows { rows: 0, ..ROWS },
            NormedRows { rows: BLOCKS + 1, ..ROWS },
            NormedRows { dtype: DType::F64, ..ROWS },
            // One vector is left over; not a vector; threads without one; half a warp; too many of both.
            NormedRows { columns: 4104, ..ROWS },
            NormedRows { columns: 4092, ..ROWS },
            NormedRows { columns: 2040, ..ROWS },
            NormedRows { columns: 128, threads: 16, vectors: 1, ..ROWS },
            NormedRows { columns: 16_384, threads: 1024, ..ROWS },
            NormedRows { columns: 20_480, threads: 512, vectors: 5, ..ROWS },
        ];
        refused.iter().for_each(|rows| assert!(!rows.has_kernel(), "{rows:?}"));
    }
}
