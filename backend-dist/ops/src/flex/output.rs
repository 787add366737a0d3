//! Output buffers of kernels.

use std::{marker::PhantomData, mem::MaybeUninit, ops::Range};

use super::parallel::{for_parts, parts};
use super::real::Real;

/// A buffer of `n` elements, which is not zeroed first: `fill` must write all of them before it reads any.
pub(super) fn filled<E: Real>(n: usize, fill: impl FnOnce(&Output<'_, E>)) -> Vec<E> {
    let mut data: Vec<E> = Vec::with_capacity(n);
    fill(&Output::of_uninit(&mut data.spare_capacity_mut()[..n]));
    // SAFETY: every caller's `fill` writes all n elements.
    unsafe { data.set_len(n) };
    data
}

/// A buffer of rows of `columns` elements: `fill` gets the numbers of some rows, where their elements are, and these, and
/// must write all of them before it reads any. On several threads if rows, of `picoseconds` each, are enough work.
pub(super) fn filled_rows<E: Real>(
    [rows, columns]: [usize; 2],
    picoseconds: usize,
    fill: impl Fn(Range<usize>, Range<usize>, &mut [E]) + Sync,
) -> Vec<E> {
    filled(rows * columns, |out| {
        for_parts(rows, parts(rows, picoseconds), |_, rows| {
            let span = rows.start * columns..rows.end * columns;
            // SAFETY: each part has its own rows.
            let own = unsafe { out.slice(span.clone()) };
            fill(rows, span, own);
        });
    })
}

/// A buffer that several threads write to, each in its own range.
pub(super) struct Output<'a, E> {
    start: *mut E,
    len: usize,
    life: PhantomData<&'a mut [E]>,
}

// SAFETY: the only access is through `slice` and `pointer`, whose callers keep to disjoint ranges.
unsafe impl<E: Send> Sync for Output<'_, E> {}
// SAFETY: as above.
unsafe impl<E: Send> Send for Output<'_, E> {}

impl<'a, E: Real> Output<'a, E> {
    fn of_uninit(data: &'a mut [MaybeUninit<E>]) -> Self {
        Self { start: data.as_mut_ptr().cast(), len: data.len(), life: PhantomData }
    }

    /// An output buffer whose elements are initialised.
    pub(super) fn of(data: &'a mut [E]) -> Self {
        Self { start: data.as_mut_ptr(), len: data.len(), life: PhantomData }
    }

    /// The elements of `range`, which may hold anything until written.
    ///
    /// # Safety
    ///
    /// No two slices that overlap may be in use at a time.
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn slice(&self, range: Range<usize>) -> &mut [E] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} elements", self.len);
        // SAFETY: in bounds; a float has no invalid bit pattern, and callers write before they read.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.end - range.start) }
    }

    /// The address of the element at `offset`, for strided writers.
    pub(super) fn pointer(&self, offset: usize) -> *mut E {
        assert!(offset <= self.len, "element {offset} of {}", self.len);
        self.start.wrapping_add(offset)
    }
}
