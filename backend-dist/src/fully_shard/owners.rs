//! Which rank steps which parameter.

use std::collections::{HashMap, HashSet};

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;

use super::units::{Find, Units};

/// The rank that owns each of some parameters, the same on every rank.
pub struct Owners {
    owners: HashMap<ParamId, usize>,
    ranks: usize,
}

impl Owners {
    /// Assigns the parameters of `module` that require gradients to `ranks` ranks.
    pub fn of<M: Module>(module: &M, ranks: usize) -> Self {
        let mut trained = Trained { seen: HashSet::new(), params: Vec::new() };
        module.visit(&mut trained);
        Self::assign(trained.params, ranks, |_| None)
    }

    /// Assigns the parameters of `module` that [`fully_shard`](super::fully_shard) shards to `ranks` ranks.
    pub fn of_units<M: Module>(module: &M, ranks: usize, units: &Units) -> Self {
        Self::of_found(&Find::of(module, units, &|_| true), ranks, |_| None)
    }

    /// Assigns the parameters that were found to `ranks` ranks, those of `given` to that.
    pub(super) fn of_found(found: &Find, ranks: usize, given: impl Fn(ParamId) -> Option<usize>) -> Self {
        let mut seen = HashSet::new();
        let once = found.params.iter().filter(|param| seen.insert(param.id));
        Self::assign(once.map(|param| (param.id, param.length)), ranks, given)
    }

    /// Assigns parameters of these lengths to `ranks` ranks, those of `given` to that.
    fn assign(
        params: impl IntoIterator<Item = (ParamId, usize)>,
        ranks: usize,
        given: impl Fn(ParamId) -> Option<usize>,
    ) -> Self {
        let (ids, lengths): (Vec<ParamId>, Vec<_>) =
            params.into_iter().map(|(id, length)| (id, (length, given(id)))).unzip();
        Self { owners: ids.into_iter().zip(assign(&lengths, ranks)).collect(), ranks }
    }

    /// Number of ranks that share.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// The rank that steps `id`; `None` for a parameter that is not trained.
    pub fn owner(&self, id: ParamId) -> Option<usize> {
        self.owners.get(&id).copied()
    }
}

/// A rank for every parameter: the given one, else the one with the fewest elements so far, the lowest of several. So without
/// given ones no two ranks differ by more than the largest parameter.
fn assign(params: &[(usize, Option<usize>)], ranks: usize) -> Vec<usize> {
    let mut loads = vec![0; ranks];
    let mut rank_of = |(length, given): &(usize, Option<usize>)| {
        let lightest = || (0..ranks).min_by_key(|rank| loads[*rank]).expect("a group has ranks");
        let rank = given.unwrap_or_else(lightest);
        loads[rank] += length;
        rank
    };
    params.iter().map(&mut rank_of).collect()
}

struct Trained {
    seen: HashSet<ParamId>,
    params: Vec<(ParamId, usize)>,
}

impl ModuleVisitor for Trained {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.is_require_grad() && self.seen.insert(param.id) {
            self.params.push((param.id, param.shape().num_elements()));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::assign;

    #[test]
    fn parameters_go_to_the_lightest_rank_in_order() {
        assert_eq!(assign(&[6, 2, 3, 1, 4].map(|length| (length, None)), 2), [0, 1, 1, 1, 0]);
        assert_eq!(assign(&[5, 5].map(|length| (length, None)), 4), [0, 1]);
        assert_eq!(assign(&[(5, Some(1)), (2, None), (2, None), (2, None), (9, Some(0))], 2), [1, 0, 0, 0, 0]);
    }

    proptest! {
        #[test]
        fn ranks_differ_by_no_more_than_the_largest_parameter(
            lengths in prop::collection::vec(1usize..1000, 0..40),
            ranks in 1usize..9,
        ) {
            let mut loads = vec![0; ranks];
            let params: Vec<_> = lengths.iter().map(|length| (*length, None)).collect();
            for (rank, length) in assign(&params, ranks).into_iter().zip(&lengths) {
                loads[rank] += length;
            }
            let spread = loads.iter().max().unwrap() - loads.iter().min().unwrap();
            prop_assert!(spread <= lengths.iter().copied().max().unwrap_or(0), "{loads:?}");
        }
    }
}
