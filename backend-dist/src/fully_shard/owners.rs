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
        Self::assign(trained.params, ranks)
    }

    /// Assigns the parameters of `module` that [`fully_shard`](super::fully_shard) shards to `ranks` ranks.
    pub fn of_units<M: Module>(module: &M, ranks: usize, units: &Units) -> Self {
        Self::of_found(&Find::of(module, units, &|_| true), ranks)
    }

    /// Assigns the parameters that were found to `ranks` ranks.
    pub(super) fn of_found(found: &Find, ranks: usize) -> Self {
        let mut seen = HashSet::new();
        let once = found.params.iter().filter(|param| seen.insert(param.id));
        Self::assign(once.map(|param| (param.id, param.length)), ranks)
    }

    /// Assigns parameters of these lengths to `ranks` ranks.
    pub(super) fn assign(params: impl IntoIterator<Item = (ParamId, usize)>, ranks: usize) -> Self {
        let (ids, lengths): (Vec<ParamId>, Vec<usize>) = params.into_iter().unzip();
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

/// A rank for every parameter: the one with the fewest elements so far, the lowest of several. So no two ranks differ
/// by more than the largest parameter.
fn assign(lengths: &[usize], ranks: usize) -> Vec<usize> {
    let mut loads = vec![0; ranks];
    lengths
        .iter()
        .map(|length| {
            let lightest = (0..ranks).min_by_key(|rank| loads[*rank]).expect("a group has ranks");
            loads[lightest] += length;
            lightest
        })
        .collect()
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
        assert_eq!(assign(&[6, 2, 3, 1, 4], 2), [0, 1, 1, 1, 0]);
        assert_eq!(assign(&[5, 5], 4), [0, 1]);
    }

    proptest! {
        #[test]
        fn ranks_differ_by_no_more_than_the_largest_parameter(
            lengths in prop::collection::vec(1usize..1000, 0..40),
            ranks in 1usize..9,
        ) {
            let mut loads = vec![0; ranks];
            for (rank, length) in assign(&lengths, ranks).into_iter().zip(&lengths) {
                loads[rank] += length;
            }
            let spread = loads.iter().max().unwrap() - loads.iter().min().unwrap();
            prop_assert!(spread <= lengths.iter().copied().max().unwrap_or(0), "{loads:?}");
        }
    }
}
