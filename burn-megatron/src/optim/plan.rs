//! Where each parameter of a rank lies in the flat gradient buffer, and what has to be summed over which ranks.

use backend_dist::shard::Registry;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

/// One parameter in the flat buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Identity of the parameter (Burn's `ParamId`).
    pub id: u64,
    /// Name for messages.
    pub name: String,
    /// Its elements in the flat buffer.
    pub range: Range<usize>,
    /// Whether weight decay applies.
    pub weight_decay: bool,
}

/// The flat buffer of all parameters of a rank, in the registry's order. Equal on ranks that hold the same slices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BucketPlan {
    /// Parameters in order.
    pub slots: Vec<Slot>,
    /// Elements that this rank counts in the global norm: every element of the model is counted on exactly one rank
    /// of the tensor parallel group.
    pub owned: Vec<Range<usize>>,
    /// Elements to sum over blocks of so many neighbouring tensor parallel ranks, by the size of the block.
    pub partial: BTreeMap<usize, Vec<Range<usize>>>,
    by_id: HashMap<u64, usize>,
}

impl BucketPlan {
    /// The plan of a rank's parameters.
    pub fn new(registry: &Registry) -> Self {
        let mut plan = Self::default();
        let mut start = 0;
        for spec in registry.iter() {
            let at = |range: Range<usize>| start + range.start..start + range.end;
            for (section, elements) in spec.sections.iter().zip(spec.elements()) {
                if section.is_owned() {
                    plan.owned.push(at(elements));
                }
            }
            for sum in spec.gradient_sums() {
                plan.partial.entry(sum.ranks).or_default().push(at(sum.elements));
            }
            plan.by_id.insert(spec.id, plan.slots.len());
            let range = at(0..spec.local_len());
            plan.slots.push(Slot { id: spec.id, name: spec.name().into(), range, weight_decay: spec.weight_decay });
            start += spec.local_len();
        }
        plan
    }

    /// Elements of the buffer.
    pub fn len(&self) -> usize {
        self.slots.last().map_or(0, |slot| slot.range.end)
    }

    /// Whether there are no parameters.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Index of the parameter with this id.
    pub fn index(&self, id: u64) -> Option<usize> {
        self.by_id.get(&id).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use backend_dist::shard::{ParamSpec, Place, Section};

    #[test]
    fn norms_and_shared_heads_are_counted_once_and_summed_where_partial() {
        let plan = |rank| {
            let at = Place { rank, size: 4 };
            let mut registry = Registry::default();
            let qkv = vec![Section::split("q", &[8, 3], 0, 4, at), Section::split("k", &[2, 3], 0, 2, at)];
            registry.register(ParamSpec::new(qkv, false)).unwrap();
            registry.register(ParamSpec::new(vec![Section::replicated("norm", &[3], at)], true)).unwrap();
            BucketPlan::new(&registry)
        };
        let (first, second) = (plan(0), plan(1));
        assert_eq!(first.len(), 12);
        assert_eq!(
            first.slots.iter().map(|s| (s.range.clone(), s.weight_decay)).collect::<Vec<_>>(),
            [(0..9, true), (9..12, false)]
        );
        assert_eq!(first.owned, [0..6, 6..9, 9..12]);
        assert_eq!(second.owned, [0..6]);
        assert_eq!(first.partial, BTreeMap::from([(2, vec![6..9]), (4, vec![9..12])]));
        let owned: usize = (0..4).flat_map(|rank| plan(rank).owned).map(|range| range.len()).sum();
        assert_eq!(owned, 8 * 3 + 2 * 3 + 3);
    }
}
