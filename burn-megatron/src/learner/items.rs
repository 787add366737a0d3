//! Hands the outputs of all ranks to rank 0, whose thread feeds burn-train's metrics.

use std::collections::VecDeque;

use parking_lot::Mutex;

/// One queue per rank. A rank pushes its output of a step before the step's next collective; rank 0 takes one output of
/// every rank after that collective, so all of the step are there and none of the next is taken.
pub(super) struct Items<T>(Mutex<Vec<VecDeque<T>>>);

impl<T> Items<T> {
    pub fn new(ranks: usize) -> Self {
        Self(Mutex::new((0..ranks).map(|_| VecDeque::new()).collect()))
    }

    pub fn push(&self, rank: usize, item: T) {
        self.0.lock()[rank].push_back(item);
    }

    /// The oldest output of every rank that has one, in rank order.
    pub fn take(&self) -> Vec<T> {
        self.0.lock().iter_mut().filter_map(VecDeque::pop_front).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_one_per_rank_in_rank_order_even_when_a_rank_is_ahead() {
        let items = Items::new(3);
        for (rank, item) in [(2, "c1"), (0, "a1"), (2, "c2"), (1, "b1")] {
            items.push(rank, item);
        }
        assert_eq!(items.take(), ["a1", "b1", "c1"]);
        assert_eq!(items.take(), ["c2"]);
    }
}
