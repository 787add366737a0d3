//! Which rank orthogonalises which matrix, where Muon's momentum is sharded.

/// FLOPs of one Newton-Schulz iteration of a matrix: `A = X Xᵀ`, `A A` and `B X`, with the short side first.
pub fn newton_schulz_flops([rows, columns]: [usize; 2]) -> f64 {
    let (short, long) = (rows.min(columns) as f64, rows.max(columns) as f64);
    4.0 * short * short * long + 2.0 * short.powi(3)
}

/// Every matrix has one owner among the ranks whose shards it touches, so that little of it has to move: the one with
/// the least work so far.
#[derive(Clone, Debug)]
pub struct MatrixOwners {
    /// By rank.
    flops: Vec<f64>,
}

impl MatrixOwners {
    /// For so many ranks, which have nothing yet.
    pub fn new(ranks: usize) -> Self {
        Self { flops: vec![0.0; ranks] }
    }

    /// How many they are.
    pub fn ranks(&self) -> usize {
        self.flops.len()
    }

    /// The owner of the next matrix, of which the ranks `held` have so many elements; with equal work the one with most
    /// of them. The last rank if none has any.
    pub fn assign(&mut self, shape: [usize; 2], held: impl IntoIterator<Item = (usize, usize)>) -> usize {
        let touched = held.into_iter().filter(|(_, elements)| *elements > 0);
        let load = |(rank, elements): &(usize, usize)| (self.flops[*rank], *elements);
        let first = |a: &(usize, usize), b: &(usize, usize)| {
            let ((a, most), (b, other)) = (load(a), load(b));
            a.total_cmp(&b).then(other.cmp(&most))
        };
        let owner = touched.min_by(first).map_or(self.flops.len() - 1, |(rank, _)| rank);
        self.flops[owner] += newton_schulz_flops(shape);
        owner
    }

    /// FLOPs of an iteration over all matrices of the rank that has most.
    pub fn slowest(&self) -> f64 {
        self.flops.iter().copied().fold(0.0, f64::max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_matrix_goes_to_a_rank_that_has_some_of_it_and_least_to_do() {
        let (small, large) = ([2, 4], [4, 8]);
        assert_eq!(newton_schulz_flops(small), 4.0 * 4.0 * 4.0 + 2.0 * 8.0);
        assert_eq!(newton_schulz_flops([4, 2]), newton_schulz_flops(small));
        let mut owners = MatrixOwners::new(3);
        assert_eq!(owners.assign(large, [(0, 7), (1, 25)]), 1);
        assert_eq!(owners.assign(large, [(1, 30), (2, 2)]), 2);
        // Rank 0 has nothing to do, but nothing of the matrix either.
        assert_eq!(owners.assign(small, [(0, 0), (1, 4), (2, 4)]), 1);
        assert_eq!(owners.assign(small, [(0, 8)]), 0);
        assert_eq!(owners.slowest(), newton_schulz_flops(large) + newton_schulz_flops(small));
    }

    /// The matrices of a layer of Llama-3-8B, one after the other in shards of equal length, over 32 layers.
    #[test]
    fn no_rank_has_much_more_than_its_share() {
        let shapes =
            [[4096, 4096], [1024, 4096], [1024, 4096], [4096, 4096], [14_336, 4096], [14_336, 4096], [4096, 14_336]];
        let len: usize = shapes.iter().map(|[rows, columns]| rows * columns).sum();
        let all: f64 = 32.0 * shapes.into_iter().map(newton_schulz_flops).sum::<f64>();
        for (ranks, most) in [(1, 1.0), (2, 1.1), (4, 1.1), (8, 1.3)] {
            let mut owners = MatrixOwners::new(ranks);
            for _ in 0..32 {
                let mut start = 0;
                for [rows, columns] in shapes {
                    let end = start + rows * columns;
                    let shard = len / ranks;
                    let held = |rank: usize| end.min((rank + 1) * shard).saturating_sub(start.max(rank * shard));
                    owners.assign([rows, columns], (0..ranks).map(|rank| (rank, held(rank))));
                    start = end;
                }
            }
            let share = owners.slowest() / (all / ranks as f64);
            assert!(share <= most, "{ranks} ranks: {share}");
        }
    }
}
