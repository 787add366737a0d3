//! Offsets of the parameters of a bucket in its flat buffers, and the shard of each rank.

use backend_dist::mesh::GridKind;
use backend_dist::shard::{ParamSpec, Section};
use std::collections::HashMap;
use std::ops::Range;

/// One run of parameters: reduced, gathered and sharded over the data-parallel ranks as one.
#[derive(Clone, Debug)]
pub struct BucketSpec {
    /// Position of the bucket in the model, the same in every layout: the order in which norms are summed.
    pub key: usize,
    /// The parameters, in the same order on all ranks that hold slices of them.
    pub params: Vec<ParamSpec>,
    /// The matrices belong to hidden layers, so Muon orthogonalises their updates; false for embeddings and output.
    pub hidden: bool,
    /// Buckets of this kind that one pass uses at once: under ZeRO 3 on GPUs so many have whole weights at a time, and
    /// as many more get theirs meanwhile.
    pub at_once: usize,
    /// Of all parameters of the bucket.
    pub scale: ParamScale,
}

/// Factors of the learning rate and the weight decay of some parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ParamScale {
    /// Of the learning rate.
    pub lr: f64,
    /// Of the weight decay.
    pub weight_decay: f64,
}

impl Default for ParamScale {
    fn default() -> Self {
        Self { lr: 1.0, weight_decay: 1.0 }
    }
}

impl BucketSpec {
    /// The grid over which the parameters, all of one unit of the model, are sharded and copied.
    pub fn grid(&self) -> GridKind {
        self.params.first().map_or(GridKind::Dense, |param| param.unit.grid())
    }
}

/// One parameter in the flat buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    pub name: String,
    /// Its elements in the flat buffer.
    pub range: Range<usize>,
    /// Local shape.
    pub shape: Vec<usize>,
}

/// One section of a parameter in the flat buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Unit {
    pub slot: usize,
    pub section: Section,
    /// Its elements in the flat buffer.
    pub range: Range<usize>,
    /// Weight decay applies.
    pub decays: bool,
    /// The gradient is partial over so many neighbouring tensor parallel ranks.
    pub partial: Option<usize>,
    /// Muon orthogonalises it.
    pub matrix: bool,
}

/// The flat buffer of a bucket: parameters one after the other, each at a multiple of `alignment`, then padding up to
/// shards of equal length that begin at such multiples too. The gaps between and after parameters are unused.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    pub slots: Vec<Slot>,
    pub units: Vec<Unit>,
    /// Elements with padding.
    pub len: usize,
    dp_ranks: usize,
    by_id: HashMap<u64, usize>,
}

/// What a rank keeps of a unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub unit: usize,
    /// Elements in the bucket.
    pub range: Range<usize>,
    /// First of them in the buffers of the rank's region.
    pub at: usize,
}

impl Layout {
    pub fn new(bucket: &BucketSpec, dp_ranks: usize, alignment: usize) -> Self {
        let (mut slots, mut units, mut end) = (Vec::new(), Vec::new(), 0usize);
        for (slot, spec) in bucket.params.iter().enumerate() {
            let start = end.next_multiple_of(alignment);
            let sums = spec.gradient_sums();
            for (section, elements) in spec.sections.iter().zip(spec.elements()) {
                let partial = sums.iter().find(|sum| sum.elements == elements).map(|sum| sum.ranks);
                let matrix = bucket.hidden && section.global_shape.len() == 2;
                let range = start + elements.start..start + elements.end;
                units.push(Unit { slot, section: section.clone(), range, decays: spec.weight_decay, partial, matrix });
            }
            let range = start..start + spec.local_len();
            end = range.end;
            slots.push(Slot { name: spec.name().into(), range, shape: spec.local_shape() });
        }
        let by_id = bucket.params.iter().enumerate().map(|(slot, spec)| (spec.id, slot)).collect();
        Self { slots, units, len: end.next_multiple_of(dp_ranks * alignment), dp_ranks, by_id }
    }

    /// The parameter with this id, if it is in the bucket.
    pub fn slot(&self, id: u64) -> Option<usize> {
        self.by_id.get(&id).copied()
    }

    /// The elements that one data-parallel rank would have if all of them had equal shares: the pieces in which norms
    /// are summed, whatever is sharded.
    pub fn shard(&self, dp_rank: usize) -> Range<usize> {
        self.region(dp_rank, self.dp_ranks)
    }

    /// The shard of one of so many ranks, of equal length for all. The number divides that of the data-parallel ranks.
    pub fn region(&self, rank: usize, ranks: usize) -> Range<usize> {
        let len = self.len / ranks;
        rank * len..(rank + 1) * len
    }

    /// What `region` has of each unit.
    pub fn parts(&self, region: &Range<usize>) -> Vec<Part> {
        let part = |(unit, range): (usize, &Range<usize>)| {
            let range = overlap(range, region);
            Part { unit, at: range.start - region.start, range }
        };
        let parts = self.units.iter().map(|unit| &unit.range).enumerate();
        parts.filter(|(_, range)| !overlap(range, region).is_empty()).map(part).collect()
    }
}

/// What two ranges have in common; empty, and inside neither, where that is nothing.
pub(super) fn overlap(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    a.start.max(b.start)..a.end.min(b.end).max(a.start.max(b.start))
}

#[cfg(test)]
mod tests {
    use super::*;
    use backend_dist::shard::GroupPosition;

    fn spec(rank: usize) -> BucketSpec {
        let at = GroupPosition { rank, size: 4 };
        let qkv = vec![Section::split("q", &[8, 3], 0, 4, at), Section::split("k", &[2, 3], 0, 2, at)];
        let norm = vec![Section::replicated("norm", &[3], at)];
        BucketSpec {
            key: 1,
            params: vec![ParamSpec::new(qkv, false), ParamSpec::new(norm, true)],
            hidden: true,
            at_once: 1,
            scale: ParamScale::default(),
        }
    }

    #[test]
    fn norms_and_shared_heads_are_counted_once_and_summed_where_partial() {
        let layout = |rank| Layout::new(&spec(rank), 1, 1);
        let first = layout(0);
        assert_eq!(first.len, 12);
        assert_eq!(first.slots.iter().map(|slot| slot.range.clone()).collect::<Vec<_>>(), [0..9, 9..12]);
        let units = |layout: &Layout| -> Vec<_> {
            layout.units.iter().map(|u| (u.range.clone(), u.decays, u.partial, u.matrix)).collect()
        };
        let expected = [(0..6, true, None, true), (6..9, true, Some(2), true), (9..12, false, Some(4), false)];
        assert_eq!(units(&first), expected);
        let owned = |rank| -> usize {
            layout(rank).units.iter().filter(|unit| unit.section.is_owned()).map(|unit| unit.range.len()).sum()
        };
        assert_eq!((0..4).map(owned).sum::<usize>(), 8 * 3 + 2 * 3 + 3);
    }

    #[test]
    fn shards_are_equal_and_parts_cover_everything_but_padding() {
        let layout = Layout::new(&spec(0), 5, 1);
        assert_eq!(layout.len, 15);
        let parts = |dp_rank| layout.parts(&layout.shard(dp_rank));
        assert_eq!(parts(1), [Part { unit: 0, range: 3..6, at: 0 }]);
        assert_eq!(parts(4), []);
        let covered: Vec<usize> = (0..5).flat_map(parts).flat_map(|part| part.range).collect();
        assert_eq!(covered, (0..12).collect::<Vec<_>>());
        assert_eq!(layout.parts(&(4..11)).iter().map(|part| part.at).collect::<Vec<_>>(), [0, 2, 5]);
    }

    /// On GPUs: slots and shards begin at multiples of the alignment, and gaps belong to no part.
    #[test]
    fn aligned_slots_and_shards_leave_gaps_that_are_nobodys() {
        let layout = Layout::new(&spec(0), 3, 4);
        assert_eq!(layout.slots.iter().map(|slot| slot.range.clone()).collect::<Vec<_>>(), [0..9, 12..15]);
        assert_eq!(layout.len, 24);
        let shards: Vec<_> = (0..3).map(|dp_rank| layout.shard(dp_rank)).collect();
        assert_eq!(shards, [0..8, 8..16, 16..24]);
        let parts: Vec<_> = shards.iter().map(|shard| layout.parts(shard)).collect();
        assert_eq!(parts[1], [Part { unit: 1, range: 8..9, at: 0 }, Part { unit: 2, range: 12..15, at: 4 }]);
        assert_eq!(parts[2], []);
    }
}
