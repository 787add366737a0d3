//! Ranges of a buffer, packed into another one and unpacked again.

use super::{Buffer, table};
use crate::buffer::chunks;
use burn::tensor::DType;
use cubecl::server::Handle;
use kernels_cubecl::pointwise::flat::{self, CHUNK, Copies};
use std::fmt;
use std::ops::Range;

/// Ranges of a buffer that are packed into another one, one after the other.
pub struct RangeTable {
    spread: Handle,
    packed_starts: Handle,
    lens: Handle,
    chunks: usize,
    /// One past the last element in the buffer, and the total number of elements.
    ends: [usize; 2],
}

impl fmt::Debug for RangeTable {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "RangeTable({} elements)", self.len())
    }
}

impl RangeTable {
    /// For `buffer`.
    ///
    /// # Panics
    /// If a range ends after the buffer.
    pub fn new(buffer: &Buffer, ranges: &[Range<usize>]) -> Self {
        let end = ranges.iter().map(|range| range.end).max().unwrap_or(0);
        assert!(end <= buffer.len(), "elements up to {end} of {buffer:?}");
        let (spread, lens, _) = chunks(ranges, CHUNK);
        let mut len = 0;
        let start_of = |count: &u32| {
            len += count;
            len - count
        };
        let packed_starts: Vec<u32> = lens.iter().map(start_of).collect();
        let [spread, packed_starts, lens] =
            [spread, packed_starts, lens].map(|values| (table(&buffer.0, &values), values.len()));
        let (ends, chunks) = ([end, len as usize], lens.1);
        Self { spread: spread.0, packed_starts: packed_starts.0, lens: lens.0, chunks, ends }
    }

    /// Number of elements of all ranges.
    pub fn len(&self) -> usize {
        self.ends[1]
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Packs the ranges of `buffer` into the beginning of `packed`.
    ///
    /// # Panics
    /// If a buffer is not `f32` or too short.
    pub fn collect(&self, buffer: &Buffer, packed: &Buffer) {
        self.copy(buffer, packed, [&self.spread, &self.packed_starts], self.ends);
    }

    /// Unpacks the beginning of `packed` into the ranges of `buffer`.
    pub fn distribute(&self, packed: &Buffer, buffer: &Buffer) {
        self.copy(packed, buffer, [&self.packed_starts, &self.spread], [self.ends[1], self.ends[0]]);
    }

    fn copy(&self, source: &Buffer, target: &Buffer, [from, to]: [&Handle; 2], ends: [usize; 2]) {
        assert!([source, target].iter().all(|of| of.0.dtype == DType::F32), "packed ranges are f32");
        let copies = Copies { from, to, lens: &self.lens, count: self.chunks, ends };
        flat::copy(&source.0.client, &source.0.handle, &target.0.handle, copies)
            .unwrap_or_else(|error| panic!("copying {self:?} from {source:?} to {target:?}: {error}"));
    }
}
