//! Ranges of a buffer, collected in another one and brought back.

use super::{Buffer, table};
use crate::buffer::chunks;
use burn::tensor::DType;
use cubecl::server::Handle;
use kernels_cubecl::pointwise::flat::{self, CHUNK, Copies};
use std::fmt;
use std::ops::Range;

/// Ranges of a buffer that are collected in another one, one behind the other.
pub struct PieceTable {
    apart: Handle,
    close: Handle,
    lens: Handle,
    chunks: usize,
    /// One past the last element in the buffer, and the number of elements.
    ends: [usize; 2],
}

impl fmt::Debug for PieceTable {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "PieceTable({} elements)", self.len())
    }
}

impl PieceTable {
    /// For `buffer`.
    ///
    /// # Panics
    /// If a range ends behind the buffer.
    pub fn new(buffer: &Buffer, ranges: &[Range<usize>]) -> Self {
        let end = ranges.iter().map(|range| range.end).max().unwrap_or(0);
        assert!(end <= buffer.len(), "elements up to {end} of {buffer:?}");
        let (apart, lens, _) = chunks(ranges, CHUNK);
        let mut len = 0;
        let place = |count: &u32| {
            len += count;
            len - count
        };
        let close: Vec<u32> = lens.iter().map(place).collect();
        let [apart, close, lens] = [apart, close, lens].map(|values| (table(&buffer.0, &values), values.len()));
        let (ends, chunks) = ([end, len as usize], lens.1);
        Self { apart: apart.0, close: close.0, lens: lens.0, chunks, ends }
    }

    /// Elements of all ranges.
    pub fn len(&self) -> usize {
        self.ends[1]
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies the ranges of `buffer` to the beginning of `packed`.
    ///
    /// # Panics
    /// If a buffer is not `f32` or too short.
    pub fn collect(&self, buffer: &Buffer, packed: &Buffer) {
        self.copy(buffer, packed, [&self.apart, &self.close], self.ends);
    }

    /// Copies the beginning of `packed` to the ranges of `buffer`.
    ///
    /// # Panics
    /// As [`PieceTable::collect`].
    pub fn distribute(&self, packed: &Buffer, buffer: &Buffer) {
        self.copy(packed, buffer, [&self.close, &self.apart], [self.ends[1], self.ends[0]]);
    }

    fn copy(&self, source: &Buffer, target: &Buffer, [from, to]: [&Handle; 2], ends: [usize; 2]) {
        assert!([source, target].iter().all(|of| of.0.dtype == DType::F32), "pieces are f32");
        let copies = Copies { from, to, lens: &self.lens, count: self.chunks, ends };
        flat::copy(&source.0.client, &source.0.handle, &target.0.handle, copies)
            .unwrap_or_else(|error| panic!("copying {self:?} from {source:?} to {target:?}: {error}"));
    }
}
