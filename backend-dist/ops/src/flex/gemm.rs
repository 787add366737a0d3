//! GEMMs on strided memory.

use super::real::Real;

/// A strided matrix.
#[derive(Clone, Copy)]
pub(super) struct Matrix<P> {
    /// The first element.
    pub start: P,
    /// Elements from one row to the next.
    pub row: isize,
    /// Elements from one column to the next.
    pub column: isize,
}

impl<P> Matrix<P> {
    /// A row-major matrix with `row` elements from one row to the next.
    pub fn rows(start: P, row: isize) -> Self {
        Self { start, row, column: 1 }
    }

    /// The transpose, without a copy.
    pub fn transposed(self) -> Self {
        Self { start: self.start, row: self.column, column: self.row }
    }
}

/// Whether a GEMM overwrites its output or adds to it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Onto {
    /// The output is overwritten, unread.
    Overwrite,
    /// The output is added to.
    Add,
}

/// `out = [out +] factor · a b` on this thread, with `a` of size `m × k` and `b` of size `k × n`.
///
/// # Safety
///
/// The three matrices must lie in memory valid for reading, and `out` for writing by this thread alone.
pub(super) unsafe fn gemm<E: Real>(
    [m, n, k]: [usize; 3],
    out: Matrix<*mut E>,
    a: Matrix<*const E>,
    b: Matrix<*const E>,
    factor: E,
    onto: Onto,
) {
    // SAFETY: promised by the caller.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.start,
            out.column,
            out.row,
            onto == Onto::Add,
            a.start,
            a.column,
            a.row,
            b.start,
            b.column,
            b.row,
            E::ONE,
            factor,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}
