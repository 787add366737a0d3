//! Sums of squares of ranges of buffers, for norms.

use super::updates::typed;
use super::{Buffer, table};
use crate::buffer::chunks;
use crate::profile::{Operation, operation};
use cubecl::server::Handle;
use kernels_cubecl::pointwise::flat::{self, CHUNK, Chunks};
use std::fmt;
use std::ops::Range;

/// Ranges of a buffer, split into chunks, in GPU memory.
pub struct ChunkTable {
    starts: Handle,
    lens: Handle,
    /// Chunks of each range.
    counts: Vec<usize>,
    end: usize,
    elements: usize,
}

impl fmt::Debug for ChunkTable {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "ChunkTable({} ranges)", self.counts.len())
    }
}

impl ChunkTable {
    /// For `buffer`.
    ///
    /// # Panics
    /// If a range ends after the buffer.
    pub fn new(buffer: &Buffer, ranges: &[Range<usize>]) -> Self {
        let end = ranges.iter().map(|range| range.end).max().unwrap_or(0);
        assert!(end <= buffer.len(), "elements up to {end} of {buffer:?}");
        let (starts, lens, counts) = chunks(ranges, CHUNK);
        let elements = ranges.iter().map(Range::len).sum();
        Self { starts: table(&buffer.0, &starts), lens: table(&buffer.0, &lens), counts, end, elements }
    }

    fn len(&self) -> usize {
        self.counts.iter().sum()
    }
}

/// The sum of squares of each range of each `f32` or `bf16` buffer, in `f32`, with a single wait for the GPU. Bit-reproducible. Buffers are
/// read from the last to the first, the order in which gradients are complete; `ready(i)` is called before buffer `i`
/// is read.
///
/// # Panics
/// If a buffer is shorter than its table says, or the GPU has failed.
pub fn squares(buffers: &[(&Buffer, &ChunkTable)], ready: impl Fn(usize)) -> Vec<Vec<f64>> {
    let Some((Buffer(some), _)) = buffers.first() else { return Vec::new() };
    let total: usize = buffers.iter().map(|(_, table)| table.len()).sum();
    let client = &some.client;
    let sums = client.empty(4 * total.max(1));
    let mut first = total;
    for (index, (buffer, table)) in buffers.iter().enumerate().rev() {
        ready(index);
        let count = table.len();
        first -= count;
        let _noted =
            operation(&buffer.0, || Operation::optimizer("sum of squares", buffer.0.dtype.size() * table.elements));
        let chunks = Chunks { starts: &table.starts, lens: &table.lens, count, end: table.end };
        flat::squares(client, typed(buffer), chunks, &sums, first)
            .unwrap_or_else(|error| panic!("squares of {buffer:?}: {error}"));
    }
    if total == 0 {
        return buffers.iter().map(|(_, table)| vec![0.0; table.counts.len()]).collect();
    }
    let bytes = client.read_one(sums).unwrap_or_else(|error| panic!("reading the sums of squares: {error:?}"));
    let mut sums = bytemuck::pod_collect_to_vec::<u8, f32>(&bytes).into_iter().map(f64::from);
    let mut of = |table: &ChunkTable| table.counts.iter().map(|&count| sums.by_ref().take(count).sum()).collect();
    buffers.iter().map(|(_, table)| of(table)).collect()
}
