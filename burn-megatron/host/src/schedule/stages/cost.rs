//! Layers divided by what they cost.

use super::StageLayout;
use crate::schedule::Placement;

/// What a model's layers cost in one unit, and what its end (output layer and loss) does.
#[derive(Clone, Debug, PartialEq)]
pub struct PartCosts {
    /// Of each transformer layer.
    pub layers: Vec<f64>,
    /// Of the output layer, the loss, and modules of multi-token prediction.
    pub end: f64,
}

/// Stages for which a division is looked for within a moment.
const MOST_STAGES: usize = 1 << 10;

/// High enough that the costliest rank decides, which all others wait for.
const POWER: i32 = 16;

impl StageLayout {
    /// The division whose costliest rank has least to do, stages as alike as that allows; Megatron-LM's
    /// `--account-for-loss-in-pipeline-split` takes the end for one layer, here it is what it costs. Every stage has a
    /// layer, but the last one need not. None where there are fewer layers than that.
    pub fn by_cost(costs: &PartCosts, placement: Placement) -> Option<Self> {
        let (layers, stages) = (costs.layers.len(), placement.stages());
        if layers + 1 < stages || !(1..=MOST_STAGES).contains(&stages) {
            return None;
        }
        let costs = &Sums::of(costs);
        let mut counts = StageLayout::balanced(layers, stages).layer_counts();
        if layers < stages {
            counts = [vec![1; layers], vec![0]].concat();
        }
        let mut unevenness = Unevenness::of(&counts, costs, placement);
        loop {
            // What another rank gives away leaves this one waiting.
            let costliest = unevenness.costliest;
            let gives = |stage: usize| counts[stage] > usize::from(stage + 1 < stages);
            let from = (0..stages).filter(|&stage| placement.holder(stage).0 == costliest && gives(stage));
            let moves = from.flat_map(|from| (0..stages).filter(move |to| *to != from).map(move |to| (from, to)));
            let better = moves.fold(None, |better: Option<(Vec<usize>, Unevenness)>, (from, to)| {
                let mut moved = counts.clone();
                moved[from] -= 1;
                moved[to] += 1;
                let of_moved = Unevenness::of(&moved, costs, placement);
                let least = better.as_ref().map_or(&unevenness, |(_, least)| least);
                if of_moved.is_less(least) { Some((moved, of_moved)) } else { better }
            });
            let Some(better) = better else { return Some(Self::from_layer_counts(&counts)) };
            (counts, unevenness) = better;
        }
    }
}

/// Costs of all layers before each, and of the end.
struct Sums {
    before: Vec<f64>,
    end: f64,
}

impl Sums {
    fn of(costs: &PartCosts) -> Self {
        let mut sum = 0.0;
        let add = |cost: &f64| {
            sum += cost;
            sum
        };
        Self { before: std::iter::once(0.0).chain(costs.layers.iter().map(add)).collect(), end: costs.end }
    }
}

struct Unevenness {
    ranks: f64,
    stages: f64,
    /// The rank that has most to do.
    costliest: usize,
}

impl Unevenness {
    fn of(counts: &[usize], costs: &Sums, placement: Placement) -> Self {
        let all = costs.before.last().copied().unwrap_or(0.0);
        let mean = (all + costs.end) / placement.ranks() as f64;
        let mut ranks = vec![0.0; placement.ranks()];
        let (mut first, mut stages) = (0, 0.0);
        for (stage, &count) in counts.iter().enumerate() {
            let end = if stage + 1 == counts.len() { costs.end } else { 0.0 };
            let cost = (costs.before[first + count] - costs.before[first] + end) / mean;
            first += count;
            ranks[placement.holder(stage).0] += cost;
            stages += cost.powi(2);
        }
        let costliest = (0..ranks.len()).max_by(|&a, &b| ranks[a].total_cmp(&ranks[b])).unwrap_or(0);
        Self { ranks: ranks.iter().map(|rank| rank.powi(POWER)).sum(), stages, costliest }
    }

    /// By more than rounding, so that no move undoes another.
    fn is_less(&self, other: &Self) -> bool {
        match (self.ranks - other.ranks).abs() <= 1e-9 * other.ranks {
            true => self.stages < other.stages * (1.0 - 1e-9),
            false => self.ranks < other.ranks,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn counts(layers: usize, end: f64, placement: Placement) -> Vec<usize> {
        let costs = PartCosts { layers: vec![1.0; layers], end };
        StageLayout::by_cost(&costs, placement).unwrap().layer_counts()
    }

    /// Layers of each rank.
    fn of_ranks(counts: &[usize], placement: Placement) -> Vec<usize> {
        let mut ranks = vec![0; placement.ranks()];
        counts.iter().enumerate().for_each(|(stage, count)| ranks[placement.holder(stage).0] += count);
        ranks
    }

    #[test]
    fn the_end_takes_the_place_of_layers() {
        let ring = |ranks, chunks| Placement::Loop { ranks, chunks };
        assert_eq!(counts(32, 2.1, ring(4, 1)), [9, 9, 8, 6]);
        assert_eq!(counts(32, 0.0, ring(4, 2)), [4; 8]);
        assert_eq!(counts(32, 2.1, ring(1, 1)), [32]);
        for (placement, wanted) in
            [(ring(2, 2), vec![17, 15]), (ring(4, 2), vec![9, 9, 8, 6]), (ring(4, 4), vec![9, 9, 8, 6])]
        {
            let counts = counts(32, 2.1, placement);
            let mut ranks = of_ranks(&counts, placement);
            ranks[..placement.ranks() - 1].sort_by_key(|layers| std::cmp::Reverse(*layers));
            assert_eq!(ranks, wanted, "{counts:?}");
            let stages = &counts[..counts.len() - 1];
            assert!(stages.iter().max().unwrap() - stages.iter().min().unwrap() <= 1, "{counts:?}");
        }
        // In a V the end is on the first rank.
        let v = Placement::V { ranks: 4 };
        assert_eq!(of_ranks(&counts(32, 2.1, v), v)[0], 6);
        // An end that costs more than all layers has its own stage.
        assert_eq!(counts(3, 100.0, ring(2, 2)), [1, 1, 1, 0]);
        assert_eq!(StageLayout::by_cost(&PartCosts { layers: vec![1.0; 2], end: 1.0 }, ring(2, 2)), None);
    }

    #[test]
    fn layers_that_cost_less_share_a_stage() {
        let costs = PartCosts { layers: [vec![0.25; 4], vec![1.0; 6]].concat(), end: 1.0 };
        let layout = StageLayout::by_cost(&costs, Placement::Loop { ranks: 4, chunks: 1 }).unwrap();
        assert_eq!(layout.layer_counts(), [5, 2, 2, 1]);
    }

    proptest! {
        /// No rank is further above the best possible than one layer, against the trivial bound.
        #[test]
        fn ranks_are_as_even_as_layers_allow(ranks in 1usize..7, chunks in 1usize..4, more in 0usize..40, end in 0.0..6.0f64) {
            let placement = Placement::Loop { ranks, chunks };
            let layers = ranks * chunks + more;
            let counts = counts(layers, end, placement);
            prop_assert_eq!(counts.iter().sum::<usize>(), layers);
            let held = of_ranks(&counts, placement);
            let cost = |rank: usize| held[rank] as f64 + if rank + 1 == ranks { end } else { 0.0 };
            let most = (0..ranks).map(cost).fold(0.0, f64::max);
            let least = end + (chunks - 1) as f64;
            let mean = (layers as f64 + end) / ranks as f64;
            prop_assert!(most < mean.max(least) + 1.0, "{counts:?}: {most} of {mean}");
        }
    }
}
