//! Which ranks compute which sequence, where sequences of a step differ in length: short ones are packed on
//! one rank, long ones are sharded over as many as they need (Megatron's `--hybrid-context-parallel`,
//! `megatron/core/pipeline_parallel/hybrid_cp_schedule.py`).
//!
//! A packed sequence counts as one sequence everywhere; which documents are in it depends on the number of ranks, and
//! with them the masks of dropout. Auxiliary losses are means over a packed sequence, so in an MoE model nothing is
//! packed.
//!
//! Ranks are those that hold the same weights. Sequences are shared by blocks of neighbours: 2, 4, 8, …, or all. Blocks
//! lie inside each other, and all ranks take their sequences in one order, the widest blocks first: ranks that meet in
//! a block have nothing else to wait for.

use std::ops::Range;

use super::effort::Effort;

/// Sequences that are computed as one, packed one after the other, and the ranks that shard them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedSequence {
    /// Which sequences.
    pub sequences: Vec<usize>,
    /// Tokens of all of them.
    pub tokens: usize,
    /// The ranks, neighbours.
    pub ranks: Range<usize>,
}

/// The packed sequences of a step, in the order in which every rank takes those that it shares.
#[derive(Clone, Debug, PartialEq)]
pub struct DynamicContext {
    /// All packed sequences; together they have all sequences.
    pub order: Vec<PackedSequence>,
    /// When each rank is done, in units of [`Effort`].
    pub loads: Vec<f64>,
}

/// No block of ranks can hold a sequence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a sequence of {length} tokens over {ranks} ranks is more than context.max-tokens-per-rank {most} on each; nearest legal: \
     {nearest}"
)]
pub struct TooLong {
    /// Tokens.
    pub length: usize,
    /// All ranks.
    pub ranks: usize,
    /// Tokens that a rank may have of a sequence.
    pub most: usize,
    /// What it would have to be.
    pub nearest: usize,
}

/// Improvement of the makespan that is worth a wider block.
const WORTH: f64 = 0.98;

/// The sizes of blocks of `ranks` ranks: powers of two that divide them, and all.
pub fn block_sizes(ranks: usize) -> Vec<usize> {
    let powers = std::iter::successors(Some(1), |size| Some(2 * size));
    let mut sizes: Vec<usize> = powers.take_while(|size| *size < ranks && ranks.is_multiple_of(*size)).collect();
    sizes.push(ranks);
    sizes
}

impl DynamicContext {
    /// Assigns sequences of `lengths` tokens to `ranks` ranks, of which none gets more than `most` tokens of a packed
    /// sequence. Every rank has something to do, if there is a sequence.
    ///
    /// # Errors
    /// The first sequence that is too long for all ranks together.
    pub fn new(lengths: &[usize], ranks: usize, most: usize, effort: Effort) -> Result<Self, TooLong> {
        Self::of(lengths, ranks, most, true, effort)
    }

    /// The same without packing.
    pub fn apart(lengths: &[usize], ranks: usize, most: usize, effort: Effort) -> Result<Self, TooLong> {
        Self::of(lengths, ranks, most, false, effort)
    }

    fn of(lengths: &[usize], ranks: usize, most: usize, packs: bool, effort: Effort) -> Result<Self, TooLong> {
        let sizes = block_sizes(ranks);
        let least = |length: &usize| {
            let fits = sizes.iter().position(|size| length.div_ceil(*size) <= most);
            fits.ok_or(TooLong { length: *length, ranks, most, nearest: length.div_ceil(ranks) })
        };
        // As indices into the sizes.
        let mut widths = lengths.iter().map(least).collect::<Result<Vec<_>, _>>()?;
        let assigned = |widths: &[usize]| {
            let widths: Vec<usize> = widths.iter().map(|at| sizes[*at]).collect();
            assign(lengths, &widths, ranks, if packs { most } else { 0 }, effort)
        };
        let mut best = assigned(&widths);
        // The work of the busiest rank is spread over wider blocks as long as that ends the step sooner.
        loop {
            let cost = |sequence: usize| effort.of(lengths[sequence], sizes[widths[sequence]]);
            let idle = best.loads.contains(&0.0);
            let busiest = best.busiest();
            let wider = best.order.iter().filter(|packed| idle || packed.ranks.contains(&busiest));
            let wider = wider.flat_map(|packed| &packed.sequences).copied();
            let wider = wider.filter(|sequence| widths[*sequence] + 1 < sizes.len());
            let Some(sequence) = wider.max_by(|a, b| cost(*a).total_cmp(&cost(*b))) else { break };
            widths[sequence] += 1;
            let other = assigned(&widths);
            if !idle && other.makespan() > WORTH * best.makespan() {
                break;
            }
            best = other;
        }
        Ok(best)
    }

    /// When the last rank is done.
    pub fn makespan(&self) -> f64 {
        self.loads.iter().fold(0.0f64, |a, b| a.max(*b))
    }

    /// What `rank` computes, in its order.
    pub fn of_rank(&self, rank: usize) -> impl Iterator<Item = &PackedSequence> {
        self.order.iter().filter(move |packed| packed.ranks.contains(&rank))
    }

    /// The blocks of ranks, without gaps, that share the packed sequences number `round` of each of their ranks. A
    /// packed sequence has one number on all of them, because those of wider blocks come first and blocks are nested. A
    /// rank with fewer packed sequences is a block of its own.
    pub fn blocks(&self, round: usize) -> Vec<Range<usize>> {
        let block = |rank: usize| {
            let packed = self.of_rank(rank).nth(round);
            (rank < self.loads.len()).then(|| packed.map_or(rank..rank + 1, |packed| packed.ranks.clone()))
        };
        std::iter::successors(block(0), |before| block(before.end)).collect()
    }

    fn busiest(&self) -> usize {
        let ranks = 0..self.loads.len();
        ranks.max_by(|a, b| self.loads[*a].total_cmp(&self.loads[*b])).unwrap_or_default()
    }
}

/// The widest first, and of those the longest, each to the block that is free first, there into the first
/// packed sequence that has room for it: none takes a second sequence beyond `most` tokens a rank.
fn assign(lengths: &[usize], widths: &[usize], ranks: usize, most: usize, effort: Effort) -> DynamicContext {
    let mut sequences: Vec<usize> = (0..lengths.len()).collect();
    sequences.sort_by_key(|sequence| std::cmp::Reverse((widths[*sequence], lengths[*sequence])));
    let (mut loads, mut order) = (vec![0.0f64; ranks], Vec::<PackedSequence>::new());
    for sequence in sequences {
        let (width, tokens) = (widths[sequence], lengths[sequence]);
        // A block begins when the last of its ranks is free.
        let free = |block: usize| loads[block * width..(block + 1) * width].iter().fold(0.0f64, |a, b| a.max(*b));
        let block = (0..ranks / width).min_by(|a, b| free(*a).total_cmp(&free(*b))).expect("a block of a legal size");
        let ranks = block * width..(block + 1) * width;
        let room = most.saturating_mul(width);
        let mut end = free(block) + effort.of(tokens, width);
        match order.iter_mut().find(|packed| packed.ranks == ranks && packed.tokens + tokens <= room) {
            Some(packed) => {
                packed.tokens += tokens;
                packed.sequences.push(sequence);
            }
            None => {
                end += effort.pass;
                order.push(PackedSequence { sequences: Vec::from([sequence]), tokens, ranks: ranks.clone() });
            }
        }
        loads[ranks].fill(end);
    }
    DynamicContext { order, loads }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const EFFORT: Effort = Effort { token: 64.0, travel: 4.0, pass: 3000.0 };

    #[test]
    fn blocks_lie_inside_each_other() {
        assert_eq!(block_sizes(8), [1, 2, 4, 8]);
        assert_eq!(block_sizes(12), [1, 2, 4, 12]);
        assert_eq!(block_sizes(3), [1, 3]);
        assert_eq!(block_sizes(1), [1]);
    }

    #[test]
    fn long_sequences_are_shared_and_short_ones_are_not() {
        let lengths = [100, 4000, 100, 100, 100];
        let plan = DynamicContext::new(&lengths, 4, 1000, EFFORT).unwrap();
        let of =
            |sequence: usize| plan.order.iter().find(|packed| packed.sequences == [sequence]).unwrap().ranks.clone();
        assert_eq!(of(1), 0..4);
        assert!([0, 2, 3, 4].iter().all(|sequence| of(*sequence).len() == 1), "{plan:?}");
        let refused = DynamicContext::new(&[4001], 4, 1000, EFFORT).unwrap_err().to_string();
        assert!(refused.contains("4001 tokens over 4 ranks") && refused.ends_with("nearest legal: 1001"), "{refused}");
    }

    /// Many short sequences and a few long ones, as in texts from the web: against all ranks sharing every sequence,
    /// and against the smallest size that the longest one needs.
    #[test]
    fn a_skewed_step_ends_sooner_than_with_one_size() {
        let lengths: Vec<usize> = (0..120).map(|i| if i % 40 == 0 { 8192 } else { 128 + 7 * i }).collect();
        let effort = Effort::of_width(512);
        let dynamic = DynamicContext::new(&lengths, 8, 2048, effort).unwrap().makespan();
        for size in [4, 8] {
            let one_size = assign(&lengths, &vec![size; lengths.len()], 8, 2048, effort).makespan();
            assert!(dynamic < 0.97 * one_size, "{dynamic} against {one_size} with blocks of {size}");
        }
    }

    #[test]
    fn short_sequences_are_packed() {
        let plan = DynamicContext::new(&[300, 10, 290, 20, 30], 2, 600, EFFORT).unwrap();
        let mut packed: Vec<(usize, usize)> =
            plan.order.iter().map(|packed| (packed.ranks.start, packed.tokens)).collect();
        packed.sort_unstable();
        assert!(plan.order.iter().all(|packed| packed.ranks.len() == 1), "{plan:?}");
        assert_eq!(packed, [(0, 300), (1, 350)], "{plan:?}");
        let plan = DynamicContext::apart(&[300, 10, 290, 20, 30], 2, 600, EFFORT).unwrap();
        assert!(plan.order.len() == 5 && plan.order.iter().all(|packed| packed.sequences.len() == 1), "{plan:?}");
    }

    /// Every rank goes through its list; a sequence is computed when all of its ranks have reached it.
    fn ends(plan: &DynamicContext, ranks: usize) -> bool {
        let mut lists: Vec<Vec<&PackedSequence>> = (0..ranks).map(|rank| plan.of_rank(rank).collect()).collect();
        lists.iter_mut().for_each(|list| list.reverse());
        loop {
            let ready = |packed: &PackedSequence| packed.ranks.clone().all(|rank| lists[rank].last() == Some(&packed));
            let next = lists.iter().filter_map(|list| list.last()).find(|packed| ready(packed));
            let Some(next) = next.copied() else { return lists.iter().all(Vec::is_empty) };
            for rank in next.ranks.clone() {
                lists[rank].pop();
            }
        }
    }

    proptest! {
        #[test]
        fn every_sequence_is_computed_once_by_ranks_that_can_hold_it(
            lengths in prop::collection::vec(1usize..5000, 1..60),
            ranks in 1usize..17,
            spare in 1usize..4000,
        ) {
            let most = lengths.iter().max().unwrap().div_ceil(ranks) + spare;
            let plan = DynamicContext::new(&lengths, ranks, most, EFFORT).unwrap();
            let mut seen: Vec<usize> = plan.order.iter().flat_map(|packed| packed.sequences.clone()).collect();
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..lengths.len()).collect::<Vec<_>>());
            for PackedSequence { sequences, tokens, ranks: block } in &plan.order {
                prop_assert!(block_sizes(ranks).contains(&block.len()) && block.start.is_multiple_of(block.len()));
                prop_assert_eq!(*tokens, sequences.iter().map(|sequence| lengths[*sequence]).sum::<usize>());
                prop_assert!(tokens.div_ceil(block.len()) <= most);
            }
            prop_assert!((0..ranks).all(|rank| plan.of_rank(rank).next().is_some()), "a rank has nothing to do");
            prop_assert!(ends(&plan, ranks));
            for round in 0..=plan.order.len() {
                let blocks = plan.blocks(round);
                prop_assert_eq!(blocks.iter().cloned().flatten().collect::<Vec<_>>(), (0..ranks).collect::<Vec<_>>());
                for (rank, block) in blocks.iter().flat_map(|block| block.clone().map(move |rank| (rank, block))) {
                    let own = plan.of_rank(rank).nth(round).map_or(rank..rank + 1, |packed| packed.ranks.clone());
                    prop_assert_eq!(&own, block);
                }
            }
            // Never worse than the blocks that lengths ask for, unless a rank had nothing to do.
            let least: Vec<usize> = (lengths.iter())
                .map(|length| *block_sizes(ranks).iter().find(|size| length.div_ceil(**size) <= most).unwrap())
                .collect();
            let first = assign(&lengths, &least, ranks, most, EFFORT);
            prop_assert!(first.loads.contains(&0.0) || plan.makespan() <= first.makespan());
        }
    }
}
