//! One slice of one global tensor.

use std::ops::Range;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::Init;

/// Elements that are worth another thread.
const CHUNK: usize = 1 << 14;

/// A rank's position in its tensor parallel group, or for experts in the group inside an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupPosition {
    /// Position in the group.
    pub rank: usize,
    /// Size of the group.
    pub size: usize,
}

/// How a global tensor is sharded: into `parts` equal shards along `dim`, of which this is number `part`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Split {
    /// The dimension that is sharded.
    pub dim: usize,
    /// Number of shards.
    pub parts: usize,
    /// Which shard this is.
    pub part: usize,
    /// Size of the dimension as it is sharded: the global size plus the padding that makes it divisible. Padding
    /// follows the last global index, is zero and exists in no global tensor.
    pub padded: usize,
}

/// A slice as runs of one length at one distance: local element `row * width + column` is global element `first + row *
/// stride + column` if `column < used`, else padding.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StridedSlice {
    pub first: usize,
    pub stride: usize,
    pub width: usize,
    pub used: usize,
    /// Number of runs.
    pub count: usize,
}

/// The slice of a global tensor that a rank holds, and how many ranks of its tensor parallel group hold the same one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Section {
    /// Name of the global tensor.
    pub name: String,
    /// Shape of the global tensor, without padding.
    pub global_shape: Vec<usize>,
    /// The shard; `None` is the whole tensor.
    pub split: Option<Split>,
    /// How many neighbouring ranks of the tensor parallel group hold this very slice.
    pub copies: usize,
    /// Which of the copies this is; copy 0 owns the slice, that is, counts it in norms and writes it to disk. A second
    /// pipeline stage that holds it too counts from `copies` on.
    pub copy: usize,
}

impl Section {
    /// The whole tensor on every rank of the group.
    pub fn replicated(name: impl Into<String>, global_shape: &[usize], at: GroupPosition) -> Self {
        Self { name: name.into(), global_shape: global_shape.to_vec(), split: None, copies: at.size, copy: at.rank }
    }

    /// The tensor sharded along `dim` into `parts`. With fewer shards than ranks, neighbours hold the same shard.
    ///
    /// # Panics
    /// If `parts` does not divide the group's size or the dimension; layers check their configuration before.
    pub fn split(name: impl Into<String>, global_shape: &[usize], dim: usize, parts: usize, at: GroupPosition) -> Self {
        Self::split_padded(name, global_shape, dim, parts, global_shape[dim], at)
    }

    /// Like [`Section::split`], after zeros were appended to `dim` until it has `padded` indices.
    ///
    /// # Panics
    /// If `parts` does not divide the group's size or `padded`, or `padded` is smaller than the dimension.
    pub fn split_padded(
        name: impl Into<String>,
        global_shape: &[usize],
        dim: usize,
        parts: usize,
        padded: usize,
        at: GroupPosition,
    ) -> Self {
        let name = name.into();
        assert!(padded >= global_shape[dim], "{name}: padded size {padded} of dim {dim} is below {global_shape:?}");
        assert!(padded.is_multiple_of(parts), "{name}: {parts} parts do not divide {padded} in dim {dim}");
        assert!(at.size.is_multiple_of(parts), "{name}: {parts} parts do not divide {} ranks", at.size);
        let copies = at.size / parts;
        let split = Split { dim, parts, part: at.rank / copies, padded };
        Self { name, global_shape: global_shape.to_vec(), split: Some(split), copies, copy: at.rank % copies }
    }

    /// The same slice, held once more by another pipeline stage than its owner's.
    pub fn held_elsewhere(self) -> Self {
        Self { copy: self.copies + self.copy, ..self }
    }

    /// Shape of the slice, padding included.
    pub fn local_shape(&self) -> Vec<usize> {
        let mut shape = self.global_shape.clone();
        if let Some(split) = &self.split {
            shape[split.dim] = split.padded / split.parts;
        }
        shape
    }

    /// Number of elements of the slice, padding included.
    pub fn local_len(&self) -> usize {
        self.local_shape().iter().product()
    }

    /// Whether this rank counts the slice in norms and writes it to disk: true for one of the copies.
    pub fn is_owned(&self) -> bool {
        self.copy == 0
    }

    /// The global indices that the slice covers, one range per dimension. Padding is not covered, so the range of the
    /// sharded dimension may be shorter than the local one, or empty.
    pub fn ranges(&self) -> Vec<Range<usize>> {
        let mut ranges: Vec<Range<usize>> = self.global_shape.iter().map(|&size| 0..size).collect();
        if let Some(split) = &self.split {
            let (size, step) = (self.global_shape[split.dim], split.padded / split.parts);
            ranges[split.dim] = (split.part * step).min(size)..((split.part + 1) * step).min(size);
        }
        ranges
    }

    /// The offsets of the slice in the flat global tensor.
    #[doc(hidden)]
    pub fn strided(&self) -> StridedSlice {
        let whole = self.global_shape.first().copied().unwrap_or(1);
        let (dim, range, local_dim) = match &self.split {
            None => (0, 0..whole, whole),
            Some(split) => (split.dim, self.ranges()[split.dim].clone(), split.padded / split.parts),
        };
        let global_dim = self.global_shape.get(dim).copied().unwrap_or(1);
        let count = self.global_shape[..dim].iter().product();
        let inner: usize = self.global_shape.get(dim + 1..).unwrap_or_default().iter().product();
        let (first, stride) = (range.start * inner, global_dim * inner);
        StridedSlice { first, stride, width: local_dim * inner, used: range.len() * inner, count }
    }

    /// The runs of elements that are contiguous both globally and locally: `(global start, local start, length)`.
    fn runs(&self) -> Vec<(usize, usize, usize)> {
        let StridedSlice { first, stride, width, used, count } = self.strided();
        let starts = (0..count).map(|row| (first + row * stride, row * width, used));
        starts.filter(|(_, _, length)| *length > 0).collect()
    }

    /// The slice of a global tensor; padding is `T::default()`.
    ///
    /// # Panics
    /// If `global` does not have the global shape's number of elements.
    pub fn slice<T: Copy + Default>(&self, global: &[T]) -> Vec<T> {
        assert_eq!(global.len(), self.global_shape.iter().product::<usize>(), "{}: {:?}", self.name, self.global_shape);
        let mut local = vec![T::default(); self.local_len()];
        for (from, to, length) in self.runs() {
            local[to..to + length].copy_from_slice(&global[from..from + length]);
        }
        local
    }

    /// The reverse of [`Section::slice`]: writes the slice into a global tensor and drops the padding.
    ///
    /// # Panics
    /// If either does not have its shape's number of elements.
    pub fn write_to<T: Copy>(&self, local: &[T], global: &mut [T]) {
        assert_eq!(global.len(), self.global_shape.iter().product::<usize>(), "{}: {:?}", self.name, self.global_shape);
        assert_eq!(local.len(), self.local_len(), "{}: local {:?}", self.name, self.local_shape());
        for (to, from, length) in self.runs() {
            global[to..to + length].copy_from_slice(&local[from..from + length]);
        }
    }

    /// Copies values of the box [`Section::ranges`], in row-major order, into a local array with zero padding.
    ///
    /// # Panics
    /// If `values` does not have the box's number of elements.
    pub fn pad<T: Copy + Default>(&self, values: &[T]) -> Vec<T> {
        let mut local = vec![T::default(); self.local_len()];
        let mut taken = 0;
        for (_, to, length) in self.runs() {
            local[to..to + length].copy_from_slice(&values[taken..taken + length]);
            taken += length;
        }
        assert_eq!(taken, values.len(), "{}: values of the slice {:?}", self.name, self.ranges());
        local
    }

    /// The reverse of [`Section::pad`]: the values of the box [`Section::ranges`], in row-major order.
    ///
    /// # Panics
    /// If `local` does not have [`Section::local_len`] elements.
    pub fn unpad<T: Copy>(&self, local: &[T]) -> Vec<T> {
        assert_eq!(local.len(), self.local_len(), "{}: local {:?}", self.name, self.local_shape());
        self.runs().into_iter().flat_map(|(_, from, length)| &local[from..from + length]).copied().collect()
    }

    /// The slice of a freshly initialised global tensor, bit-identical in every layout; padding is zero.
    pub fn initial(&self, init: Init, seed: u64) -> Vec<f64> {
        self.initial_part(init, seed, 0..self.local_len(), |value| value)
    }

    /// Some elements of [`initial`](Self::initial), rounded. Uses all cores.
    ///
    /// # Panics
    /// If the slice has no such elements.
    pub fn initial_part<T: Copy + Default + Send>(
        &self,
        init: Init,
        seed: u64,
        part: Range<usize>,
        round: impl Fn(f64) -> T + Sync,
    ) -> Vec<T> {
        assert!(part.end <= self.local_len(), "elements {part:?} of {}", self.local_len());
        let (stream, runs) = (super::stable_hash(&self.name), self.runs());
        let mut values = vec![T::default(); part.len()];
        let fill = |(chunk, values): (usize, &mut [T])| {
            let start = part.start + chunk * CHUNK;
            let end = start + values.len();
            let later = runs.partition_point(|(_, to, length)| to + length <= start);
            for (from, to, length) in runs[later..].iter().take_while(|(_, to, _)| *to < end) {
                for at in start.max(*to)..end.min(to + length) {
                    values[at - start] = round(init.at(seed, stream, (from + at - to) as u64));
                }
            }
        };
        match values.len() {
            ..=CHUNK => fill((0, &mut values)),
            _ => values.par_chunks_mut(CHUNK).enumerate().for_each(fill),
        }
        values
    }
}
