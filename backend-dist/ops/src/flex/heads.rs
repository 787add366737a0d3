//! Heads of tensors `[s, b, h, d]` where they lie in a buffer, through their strides.

use std::ops::Range;

use burn::backend::flex::FlexTensor;

use super::{gemm::Matrix, output::Output, real::Real};

/// The layout of the heads of one tensor `[s, b, h, d]` in a buffer.
#[derive(Clone, Copy)]
pub(super) struct Heads {
    pub offset: usize,
    /// Strides of sequence, batch, head and element.
    pub strides: [isize; 4],
}

impl Heads {
    pub fn of(x: &FlexTensor) -> Self {
        let strides = x.layout().strides();
        Self { offset: x.layout().start_offset(), strides: [strides[0], strides[1], strides[2], strides[3]] }
    }

    /// The layout of `heads` heads of size `d` from head `first` on, in a dense tensor of `all` heads and batch `b`.
    pub fn within(first: usize, all: usize, b: usize, d: usize) -> Self {
        Self { offset: first * d, strides: [(b * all * d) as isize, (all * d) as isize, d as isize, 1] }
    }

    /// Offset of position `s` of head `h` in sequence `b`.
    pub fn at(&self, s: usize, b: usize, h: usize) -> usize {
        let [by_s, by_b, by_h, _] = self.strides;
        (self.offset as isize + s as isize * by_s + b as isize * by_b + h as isize * by_h) as usize
    }

    pub fn matrix<P>(&self, start: P) -> Matrix<P> {
        Matrix { start, row: self.strides[0], column: self.strides[3] }
    }
}

/// A tensor's heads for reading.
pub(super) struct Input<'a, E> {
    data: &'a [E],
    pub heads: Heads,
}

impl<'a, E: Real> Input<'a, E> {
    pub fn of(x: &'a FlexTensor) -> Self {
        Self { data: E::buffer(x), heads: Heads::of(x) }
    }

    pub fn matrix(&self, s: usize, b: usize, h: usize) -> Matrix<*const E> {
        self.heads.matrix(self.from(s, b, h).as_ptr())
    }

    /// The buffer from position `s` of a head on.
    pub fn from(&self, s: usize, b: usize, h: usize) -> &'a [E] {
        &self.data[self.heads.at(s, b, h)..]
    }
}

/// A tensor's heads for writing.
pub(super) struct Target<'a, E> {
    pub data: &'a Output<'a, E>,
    pub heads: Heads,
}

impl<E: Real> Target<'_, E> {
    /// Zeroes consecutive positions of a head, `d` elements each.
    ///
    /// # Safety
    ///
    /// No other thread may touch this head.
    pub unsafe fn clear(&self, positions: Range<usize>, [b, h]: [usize; 2], d: usize) {
        for s in positions {
            let at = self.heads.at(s, b, h);
            // SAFETY: promised by the caller.
            unsafe { self.data.slice(at..at + d) }.fill(E::ZERO);
        }
    }

    pub fn matrix(&self, s: usize, b: usize, h: usize) -> Matrix<*mut E> {
        self.heads.matrix(self.data.pointer(self.heads.at(s, b, h)))
    }

    /// Divides consecutive positions of a head each by its total. A total of zero means that no key was visible: the
    /// output is zero.
    ///
    /// # Safety
    ///
    /// No other thread may touch this head.
    pub unsafe fn divide_rows(&self, [s, b, h]: [usize; 3], d: usize, totals: &[E]) {
        for (i, &total) in totals.iter().enumerate() {
            let factor = if total == E::ZERO { E::ZERO } else { E::ONE / total };
            let at = self.heads.at(s + i, b, h);
            // SAFETY: promised by the caller.
            unsafe { self.data.slice(at..at + d) }.iter_mut().for_each(|x| *x *= factor);
        }
    }
}
