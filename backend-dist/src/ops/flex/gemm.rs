//! Matrix products on strided memory.

use super::real::Real;

/// A matrix somewhere in memory.
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
    /// Rows of `row` elements from each other, elements of a row side by side.
    pub fn rows(start: P, row: isize) -> Self {
        Self { start, row, column: 1 }
    }

    /// Rows and columns exchanged.
    pub fn transposed(self) -> Self {
        Self { start: self.start, row: self.column, column: self.row }
    }
}

/// What a product does with the values already there.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Onto {
    /// They are overwritten, unread.
    Overwrite,
    /// The product is added.
    Add,
}

/// `out = [out +] factor · a b` on this thread, with `a` of size `m × k` and `b` of size `k × n`.
///
/// # Safety
///
/// The three matrices must lie in memory valid for reading, and `out` for writing by this thread alone.
pub(super) unsafe fn product<E: Real>(
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
